"""The C++ and CUDA kernels: their Python faces, and the memory that they work in."""
