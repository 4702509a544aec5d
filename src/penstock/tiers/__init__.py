"""KV blocks on disk: kept over a restart, shared by every process that has the same directory.

    DiskTier   one model's blocks by key            disk.py
    Writer     the queue and the thread before it   writer.py
    Store      the directory, one quota over all    store.py

Imports no torch: the command line uses it too.
"""

from penstock.tiers.disk import DiskTier
from penstock.tiers.format import Payload
from penstock.tiers.quota import Quota
from penstock.tiers.store import Outcome, Store
from penstock.tiers.writer import Writer

__all__ = ["DiskTier", "Outcome", "Payload", "Quota", "Store", "Writer"]
