"""Models on disk: what each one is, read from headers and configurations only, without torch.

`read_card` reads one folder, `Catalog` finds all of them. What cannot be read is an error that
names the file and the field, never a zero.
"""

from penstock.catalog.card import ORIGIN_FILE, Card, read_card
from penstock.catalog.scan import Catalog, huggingface_cache

__all__ = ["ORIGIN_FILE", "Card", "Catalog", "huggingface_cache", "read_card"]
