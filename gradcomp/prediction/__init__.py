"""What a training step will take, before any cluster is there: messages of one rank, a link, and the overlap with backward."""
