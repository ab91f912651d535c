"""Studies: the tables and pictures of trainings over many seeds."""
