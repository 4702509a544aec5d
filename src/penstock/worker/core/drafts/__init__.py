"""Guesses at the next tokens, which one step verifies together: who makes them, and how many."""
