"""Memory as it is read: the machine, its control groups, processes, GPUs."""
