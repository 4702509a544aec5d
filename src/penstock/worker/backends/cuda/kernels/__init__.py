"""Kernels for a GPU, in Triton."""
