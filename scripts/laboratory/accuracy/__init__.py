"""Time to accuracy: whole trainings by every way to exchange gradients, and the seconds that they take on a cluster."""
