"""Stands in for what a fork server imports: a child of it works for three seconds meanwhile."""

from __future__ import annotations

import os
import time

if (child := os.fork()) == 0:
    while time.process_time() < 3.0:
        pass
    os._exit(0)
os.waitpid(child, 0)
