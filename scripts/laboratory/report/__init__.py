"""What is written down: tables, progress, result files and pictures."""
