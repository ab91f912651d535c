"""What scripts/study.py is made of."""
