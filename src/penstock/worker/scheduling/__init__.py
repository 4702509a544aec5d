"""What runs in a step. No torch."""
