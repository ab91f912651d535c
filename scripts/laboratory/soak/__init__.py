"""The soak: what it draws, its ranks, and the judgement of their records."""
