"""What scripts/compare.py is made of."""
