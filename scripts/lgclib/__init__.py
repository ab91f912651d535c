"""What scripts/lgc.py consists of."""
