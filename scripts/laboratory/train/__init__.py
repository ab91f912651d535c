"""Step times of a training job on real ranks."""
