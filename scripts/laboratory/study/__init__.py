"""Accuracy and loss of specs over many seeds."""
