"""The C++ and CUDA kernels: their Python faces, and their memory."""
