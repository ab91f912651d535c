"""Exchanges that algorithms share: they combine all ranks' messages into one update."""
