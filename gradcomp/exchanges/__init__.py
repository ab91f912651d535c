"""Steps that algorithms share: ways of bringing all ranks' messages together into one update."""
