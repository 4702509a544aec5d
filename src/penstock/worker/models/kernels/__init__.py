"""What kernels do, and attention in plain torch; the quick ones are the backends'."""
