"""A step: which buckets there are, what feedback adds, and the reducer that sends them."""
