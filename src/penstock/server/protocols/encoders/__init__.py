"""Routes that answer with vectors and scores: OpenAI's, Cohere's and Jina's, vLLM's."""
