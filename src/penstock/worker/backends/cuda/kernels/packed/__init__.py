"""Products with packed weights on a GPU: their layout there, and its kernels."""
