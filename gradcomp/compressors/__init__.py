"""The algorithms. A file or folder here is a compressor of that name; gradcomp/spec.py finds it."""
