"""An application with something in front of it, outside all that Starlette and FastAPI put around it.

What a router passes on needs nothing of the application here: the owner's does all that is done for a request. A
middleware, however far outside, costs each forwarded request what the framework does before any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

_Front = TypeVar("_Front", bound=ASGIApp)


class FrontedApp(Starlette):
    """Starlette with room in front of it. Derive from it and FastAPI, in this order, for FastAPI with that room."""

    _front: ASGIApp | None = None

    def put_in_front(self, make: Callable[[ASGIApp], _Front]) -> _Front:
        """Have every connection come to what `make` makes of this application, and return that.

        Args:
            make: Is given this application as it is without anything in front.

        Raises:
            RuntimeError: Something stands there already.
        """
        if self._front is not None:
            raise RuntimeError("something stands in front of this application already; put one thing there")
        front = make(super().__call__)
        self._front = front
        return front

    def put_outermost(self, make: Callable[[ASGIApp], _Front]) -> _Front:
        """Have every connection come to what `make` makes of this application with all that stands in front of it."""
        front = make(self._front or super().__call__)
        self._front = front
        return front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if self._front is None:
            await super().__call__(scope, receive, send)
            return
        # As FastAPI says it: what stands in front looks at routes, too.
        root_path = getattr(self, "root_path", None)
        if root_path:
            scope["root_path"] = root_path
        if scope["type"] == "lifespan":
            # What comes by a router's private socket passes all that stands in front, too.
            scope.setdefault("app", self._front)
        await self._front(scope, receive, send)
