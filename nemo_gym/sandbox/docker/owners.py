"""Whose a container is: labels that name the worker which made it, and the removal of what dead workers left."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nemo_gym.sandbox.docker.engine import Engine, EngineError

logger = logging.getLogger(__name__)

LABEL: Final = "nemo_gym.sandbox"
MACHINE: Final = f"{LABEL}.machine"
PID: Final = f"{LABEL}.pid"
STARTED: Final = f"{LABEL}.started"
GONE: Final = (404, 409)
"""Statuses of a removal that mean: it is removed, or being removed."""


def machine() -> str:
    """Return what is the same for all whose process numbers mean the same: this boot, and the process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def started(pid: int) -> str | None:
    """Return when a living process started, in the kernel's own unit; None when there is none, "" where unknown."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def labels() -> dict[str, str]:
    """Return the labels of a container that this process makes."""
    return {LABEL: "1", MACHINE: machine(), PID: str(os.getpid()), STARTED: started(os.getpid()) or ""}


def is_left(container: Mapping[str, Any]) -> bool:
    """Whether the worker that made a container of this machine has ended."""
    found = container.get("Labels") or {}
    pid = str(found.get(PID, ""))
    return pid.isdigit() and started(int(pid)) != found.get(STARTED)


async def remove(engine: Engine, container: str, timeout_s: float = 0) -> None:
    """Kill and remove a container; fine when it is gone."""
    try:
        await engine.call("DELETE", f"/containers/{container}", {"force": 1, "v": 1}, timeout_s=timeout_s)
    except EngineError as error:
        if error.status not in GONE:
            raise


async def sweep(engine: Engine) -> list[str]:
    """Remove the containers that ended workers of this machine left; return their names."""
    filters = json.dumps({"label": [f"{MACHINE}={machine()}"]})
    containers = await engine.call("GET", "/containers/json", {"all": 1, "filters": filters})
    removed = []
    for container in containers or []:
        if is_left(container):
            await remove(engine, container["Id"])
            removed.append(str((container.get("Names") or [container["Id"]])[0]).lstrip("/"))
            logger.warning("removed a sandbox that an earlier run left: the container %s", removed[-1])
    return removed
