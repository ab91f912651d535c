"""The user's optimizer: its settings, its momentum and moments, and the steps that are taken for it."""
