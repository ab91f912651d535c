"""The vocabulary that all rooms share: compressors, their requests, and the wrappers of a compressor."""
