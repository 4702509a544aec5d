"""Penstock: many language models from a fixed amount of memory, behind the OpenAI and Anthropic APIs."""
