"""Quantised checkpoints made of plain ones, some rows of a weight at a time."""
