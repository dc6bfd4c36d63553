"""Small helpers for environments that use sandboxes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

CPU_CAP_ENV_VARS: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TBB_NUM_THREADS",
    "GOMAXPROCS",
    "CARGO_BUILD_JOBS",
    "CMAKE_BUILD_PARALLEL_LEVEL",
)
"""Variables by which common runtimes and build tools choose how many threads they start."""


def cpu_cap_env(cpu: float | None) -> dict[str, str]:
    """Return variables that ask programs for no more than `cpu` threads, rounded up; none where `cpu` is None.

    Without them, a runtime in a sandbox that may use two processors starts a thread for each of the machine's.
    """
    if cpu is None:
        return {}
    count = str(max(1, math.ceil(cpu)))
    return dict.fromkeys(CPU_CAP_ENV_VARS, count)


def rewrite_image(image: str, rewrites: Mapping[str, str] | None = None) -> str:
    """Return `image` with the longest matching prefix replaced, for example to name a mirror.

    Args:
        image: An image's name, for example `docker.io/library/python:3.12`.
        rewrites: New beginnings by old ones, for example `{"docker.io/": "mirror.example:5000/"}`.
    """
    for prefix in sorted(rewrites or {}, key=len, reverse=True):
        if image.startswith(prefix):
            return (rewrites or {})[prefix] + image.removeprefix(prefix)
    return image
