"""The vocabulary that all rooms share: compressors, their requests, and what is put around a compressor."""
