"""What drives a compressor: gradients in, error feedback, buckets, agreement of the ranks, updates out."""
