"""Request fields that several protocols share, and their conversion for the worker."""
