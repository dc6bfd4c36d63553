"""Modules that are imported when something in them is first used.

Whoever defines an environment, or tests one, imports its base class and may never call another server. What only such
a call needs, aiohttp above all, would be a sixth of that import. A server that is to serve imports it at its start
(`server.late_imports`), not on its event loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands for a module, and imports it when one of its names is first looked up.

    Names are looked up anew each time, as with the module itself. Type checkers are shown the module instead::

        if TYPE_CHECKING:
            import aiohttp
        else:
            aiohttp = LazyModule("aiohttp")

    Args:
        name: The module's whole name.
    """

    __slots__ = ("_module_name",)

    def __init__(self, name: str) -> None:
        self._module_name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module_name), name)

    def __repr__(self) -> str:
        return f"LazyModule({self._module_name!r})"
