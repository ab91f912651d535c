"""What is put around a compressor: by layer, by host."""
