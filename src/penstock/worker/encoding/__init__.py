"""The encode engine: vectors and scores of whole texts, packed side by side, nothing kept."""
