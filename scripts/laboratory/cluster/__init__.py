"""The emulated cluster of scripts/cluster. It imports the standard library alone."""
