"""What auto does: the ways among which it chooses, what it measures, and how the ranks decide together."""
