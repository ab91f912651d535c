"""Watching a training: figures of its steps, a comparison with dense, and a check of the replicas."""
