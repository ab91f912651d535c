"""The C++ and CUDA kernels: their Python faces, and their memory."""

# Whether this process is a command that only looks at the package. It does so without an extension that does not load, too.
only_looks = False
