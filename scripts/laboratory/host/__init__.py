"""The cost of a step on the host beside its kernels: Python, and the binding."""
