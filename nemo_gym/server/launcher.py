"""How a deployment starts a server with several workers: `python -m nemo_gym.server.launcher MODULE... ENTRYPOINT`.

The named modules of the framework are imported first, and the template of the workers is forked; then the entrypoint
runs in this process as `python ENTRYPOINT` would run it. That command still serves, with workers that each import
everything by themselves.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import types
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Final

# With what uvicorn imports when a worker begins to serve, and AnyIO at its first use.
_SERVING: Final = (
    "nemo_gym.server.template",
    "nemo_gym.server.bootstrap",
    "nemo_gym.server.late_imports",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvicorn.lifespan.on",
    "anyio._backends._asyncio",
)


def can_fork_workers() -> bool:
    """Whether workers can be forked from a template here: elsewhere than on Linux, system libraries forbid it."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")


def main(arguments: list[str]) -> None:
    """Import the framework, fork the template, and run the entrypoint; in a worker, run that worker."""
    *modules, entrypoint = arguments
    # Put right first of all: `-m` has the current folder there.
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(entrypoint).resolve().parent)
    sys.argv = [entrypoint]
    _import_framework([*_SERVING, *modules])
    order = None
    # A thread would not be there in the forked process, but the locks that it holds would be.
    if can_fork_workers() and threading.active_count() == 1:
        template = importlib.import_module("nemo_gym.server.template")
        with suppress(OSError):
            order = template.fork_template()
    if order is None:
        _run_as_main(entrypoint)
    else:
        order.run()


def _import_framework(modules: Iterable[str]) -> None:
    """Import what all workers share, and keep the garbage collector from looking at it, then and ever after."""
    gc.disable()
    try:
        for module in modules:
            # What is missing, such as an extra's package, is for the process that needs it to say.
            with suppress(ImportError):
                importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _run_as_main(entrypoint: str) -> None:
    """Run a file as the module `__main__`, as the interpreter does."""
    path = str(Path(entrypoint).absolute())
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__package__ = None
    module.__dict__.update(__builtins__=__builtins__, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


if __name__ == "__main__":
    main(sys.argv[1:])
