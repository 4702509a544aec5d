"""How one layer keeps keys and values in blocks: as numbers, or as codes with scales."""
