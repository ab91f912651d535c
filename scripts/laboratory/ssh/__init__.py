"""scripts/check_ssh: real launchers that start ranks on other hosts through ssh."""
