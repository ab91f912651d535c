"""Other projects' programs, run with one line more."""
