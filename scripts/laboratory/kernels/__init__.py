"""The kernels: timed cases, promises, registers and memory by nvcc's report, and predicted times on a GPU."""
