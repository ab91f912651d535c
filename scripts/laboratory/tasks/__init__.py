"""The tasks: data, models, and the loop over the steps."""
