"""What a step costs the host beside its kernels: Python, and the binding."""
