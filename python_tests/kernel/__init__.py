"""The CUDA kernels alone: compiled by nvcc into one library, called through ctypes, compared with the reference."""
