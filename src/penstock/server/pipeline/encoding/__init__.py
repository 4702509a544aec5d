"""Texts to vectors and scores: the same door, line, lease and books as for generated text."""
