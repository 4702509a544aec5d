"""Recurrent state: one slot for each sequence, and snapshots of it at the ends of blocks."""
