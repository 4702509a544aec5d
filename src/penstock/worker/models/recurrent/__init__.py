"""Recurrent layers inside transformers' model code: their state comes from slots and goes there."""
