"""GGUF files: their headers, and what a model in one is to transformers. Without torch.

Imports nothing of the catalog around it, which asks `checkpoint` for the weights of a file and
`configuration` for the files that a model folder has beside them.
"""
