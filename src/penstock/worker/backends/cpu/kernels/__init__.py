"""Kernels for a CPU, compiled by Numba."""
