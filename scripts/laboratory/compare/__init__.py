"""Specs side by side: step times, throughput, and loss against seconds."""
