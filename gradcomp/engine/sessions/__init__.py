"""The ranks of a training: their meeting, who joins and leaves, and the door's one session."""
