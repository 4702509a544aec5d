"""transformers' model code with our attention and kernels plugged in."""
