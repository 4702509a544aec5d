"""OpenAI's API, and what vLLM and llama.cpp add to it."""
