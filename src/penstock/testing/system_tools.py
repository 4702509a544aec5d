"""Programs of the system that some tests need: chromium and promtool.

`.ci/run` installs them where it may. There a test that needs one must not be skipped quietly.
"""

from __future__ import annotations

import os
import shutil


def must_be_there() -> bool:
    """Whether a program's absence is a fault: in CI, where root could have installed it."""
    return (
        os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get") is not None
    )
