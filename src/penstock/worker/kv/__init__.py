"""KV blocks and the memory they live in."""
