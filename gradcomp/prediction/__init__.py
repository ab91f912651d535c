"""Step times on a cluster that need not be there: messages of one rank, a link, and the overlap with backward."""
