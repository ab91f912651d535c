"""The algorithms. Each file or folder here is a compressor of that name, which gradcomp/spec.py finds."""
