"""The parts of scripts/cluster."""
