"""The demo: two trainings on two ranks, side by side."""
