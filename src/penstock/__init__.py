"""Penstock: many language models from a fixed amount of memory, behind the usual APIs."""

__version__ = "0.1.0"
