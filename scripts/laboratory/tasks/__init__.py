"""What is trained: data, models, and the loop over the steps."""
