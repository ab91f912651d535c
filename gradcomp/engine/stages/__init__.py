"""The stages of a bucket: each prepares gradients for compression, and owns its part of the bucket's state."""
