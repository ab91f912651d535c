"""The cost of a layer: steps of models with many tiny layers, by every door, beside the door alone."""
