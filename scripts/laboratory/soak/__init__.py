"""The soak: long training with known gradients on real ranks, the trouble that it meets, and the judgement of its records."""
