"""Doors into trainers that people run: one file for each package, imported by whoever asks for it."""
