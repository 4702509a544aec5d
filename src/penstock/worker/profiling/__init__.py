"""What a model costs on this machine, measured when it loads."""
