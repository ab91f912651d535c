"""The version of gradcomp, here and nowhere else."""

VERSION = "0.1.0"
