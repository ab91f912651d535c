"""The kernels: what is timed, what is promised, what nvcc makes of them, and what they should take on a GPU."""
