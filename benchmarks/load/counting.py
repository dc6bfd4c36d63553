"""Sessions of the counter server: seed, some increments, verify, each answer checked."""

from __future__ import annotations

import json
import random
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from benchmarks.load.wire import json_bytes, post, take_cookies

_TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
_ROW = {"responses_create_params": {"input": "Raise the counter."}}
_RESPONSE = {"id": "r", "created_at": 0, "model": "none", "object": "response", "output": []}


class Session(Protocol):
    """A session under way.

    Attributes:
        right: Whether all its answers so far are what they should be.
        owner: The worker that holds it, as its cookie names it, where it does.
    """

    right: bool
    owner: str | None

    def request(self) -> bytes:
        """Return the request that is next."""
        ...

    def answered(self, status: int, body: bytes, set_cookies: list[bytes]) -> bool:
        """Take the answer to it, and return whether there is another request."""
        ...


SessionMaker: TypeAlias = Callable[[int], Session]


class CounterSession:
    """A session of a client that keeps cookies.

    Args:
        host: The value of the `Host` header.
        number: The session's number; its amounts follow from it.
        increments: How many times to raise the counter.
        owner_key: Where in the session's cookie its owner stands; empty where it does not matter.
    """

    def __init__(self, host: str, number: int, increments: int = 2, owner_key: str = "") -> None:
        self.right = True
        self.owner: str | None = None
        self._host = host
        self._owner_key = owner_key
        self._start = number % 997
        self._amounts = [(number + position) % 89 + 1 for position in range(increments)]
        self._expected = self._start + sum(self._amounts)
        self._step = 0
        self._cookies: dict[bytes, bytes] = {}

    def request(self) -> bytes:
        """Return the request that is next."""
        path, body = self._call()
        return post(self._host, path, json_bytes(body), self._cookies)

    def answered(self, status: int, body: bytes, set_cookies: list[bytes]) -> bool:
        """Take the answer to it, and return whether there is another request."""
        take_cookies(self._cookies, set_cookies)
        if self._step == 0 and self._owner_key:
            self.owner = owner_in(self._cookies, self._owner_key)
        self.right = status == 200 and self._is_right(body) and self.right
        self._step += 1
        # What follows on a refusal would be refused too; the work has to be the same for all.
        return self._step < len(self._amounts) + 2

    def _call(self) -> tuple[str, Any]:
        if self._step == 0:
            return "/seed_session", {**_ROW, "initial_count": self._start}
        if self._step <= len(self._amounts):
            return "/increment_counter", {"count": self._amounts[self._step - 1]}
        return "/verify", {**_ROW, "expected_count": self._expected, "response": _RESPONSE}

    def _is_right(self, body: bytes) -> bool:
        if self._step == 0:
            return body.startswith(b"{")
        if self._step <= len(self._amounts):
            return b"true" in body
        answer = json.loads(body)
        return bool(answer["reward"] == 1.0 and answer["final_count"] == self._expected)


class MCPCounterSession(CounterSession):
    """A session whose tool calls go over MCP: they carry the token that the seed's reply gave, and no cookie."""

    _headers = b""

    def request(self) -> bytes:
        """Return the request that is next."""
        path, body = self._call()
        if not self._is_tool_call:
            return post(self._host, path, json_bytes(body), self._cookies)
        call = {"name": path.removeprefix("/"), "arguments": body}
        message = {"jsonrpc": "2.0", "id": self._step, "method": "tools/call", "params": call}
        return post(self._host, "/mcp", json_bytes(message), headers=self._headers)

    def answered(self, status: int, body: bytes, set_cookies: list[bytes]) -> bool:
        """Take the answer to it, and return whether there is another request."""
        if self._step == 0 and status == 200:
            token = json.loads(body)["mcp"]["headers"][_TOKEN_HEADER]
            self._headers = (f"Accept: application/json, text/event-stream\r\n{_TOKEN_HEADER}: {token}\r\n").encode()
        return super().answered(status, body, set_cookies)

    @property
    def _is_tool_call(self) -> bool:
        return 0 < self._step <= len(self._amounts)

    def _is_right(self, body: bytes) -> bool:
        if self._is_tool_call:
            return json.loads(body).get("result", {}).get("isError") is False
        return super()._is_right(body)


def owner_in(cookies: Mapping[bytes, bytes], key: str) -> str | None:
    """Return the owner that a session's cookie names, readable though signed."""
    for value in cookies.values():
        try:
            session = json.loads(b64decode(value.partition(b".")[0], validate=True))
        except ValueError:
            continue
        if isinstance(session, dict) and key in session:
            return str(session[key])
    return None


def session_maker(job: Mapping[str, Any]) -> SessionMaker:
    """Return what makes the sessions of a job: `protocol`, `increments` (a number, or two: from, to), `owner_key`."""
    host, owner_key = f"{job['host']}:{job['port']}", job.get("owner_key", "")
    kind = MCPCounterSession if job.get("protocol") == "mcp" else CounterSession
    increments = job.get("increments", 2)
    lengths = random.Random(job.get("seed", 0))

    def make(number: int) -> Session:
        length = increments if isinstance(increments, int) else round(_skewed(lengths, *increments))
        return kind(host, number, length, owner_key)

    return make


def _skewed(lengths: random.Random, shortest: int, longest: int) -> float:
    """Most sessions are short and a few are long: the logarithm of the length is even."""
    return float(shortest * (longest / shortest) ** lengths.random())
