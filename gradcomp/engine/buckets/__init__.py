"""A bucket of gradients: what it keeps between steps, how it is filled, clipped and scaled, and where its update is put."""
