"""Kernels over the KV arena: Numba on CPU, Triton on CUDA."""
