"""Process limits that a server or collector with thousands of open connections has to raise."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files to the hard one; each connection in flight holds a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports no hard limit and refuses an unlimited soft one.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
