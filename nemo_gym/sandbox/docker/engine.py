"""A client of the Docker Engine API, over its Unix socket or plain TCP: as much of it as sandboxes need.

Failure policy: whatever goes wrong between here and the daemon is an `EngineError` that names the daemon. No call
waits longer for the daemon than `timeout_s`; a stream may go on as long as bytes come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
from yarl import URL

from nemo_gym.errors import ConfigError, SandboxError

DEFAULT_HOST: Final = "unix:///var/run/docker.sock"
OUR_VERSION: Final = (1, 44)
OLDEST_VERSION: Final = (1, 30)
CHUNK: Final = 1 << 16
MAX_ERROR_BYTES: Final = 1 << 16
STDOUT: Final = 1
STDERR: Final = 2
SYSTEM_ERROR: Final = 3
FRAME_HEADER: Final = 8


class EngineError(SandboxError):
    """Raised when the Docker daemon refused a call, or gave no proper answer.

    Args:
        message: What is wrong.
        status: The HTTP status of a refusal; None where there was no answer.
        sent: Whether the daemon may have got the call.
    """

    def __init__(self, message: str, status: int | None = None, *, sent: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.sent = sent


def daemon_host(configured: str | None) -> str:
    """Return the daemon's address: the configured one, `DOCKER_HOST`, or the usual socket.

    Raises:
        ConfigError: When it is of a kind that is not supported.
    """
    host = configured or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    parts = urlsplit(host)
    usable = parts.path if parts.scheme == "unix" else parts.scheme in ("tcp", "http") and parts.hostname
    if not usable or (parts.scheme != "unix" and os.environ.get("DOCKER_TLS_VERIFY")):
        raise ConfigError(
            f"the Docker daemon's address {host!r} is not supported: unix:///path/of/socket or tcp://host:port, "
            "without TLS",
            key="sandbox_provider.host",
            hint="Set host of the docker sandbox provider, or DOCKER_HOST.",
        )
    return host


class Stream:
    """A connection that the daemon took out of HTTP: bytes to standard input, frames from the two outputs."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, chunked: bool, where: str
    ) -> None:
        self._reader, self._writer, self._where = reader, writer, where
        self._chunked, self._left = chunked, 0

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield pieces of output with the number of their stream; EngineError when they break off."""
        with self._translated():
            while header := await self._header():
                kind, size = header[0], int.from_bytes(header[4:], "big")
                if kind > SYSTEM_ERROR or any(header[1:4]):
                    raise EngineError(f"{self._where} sent no frame of output but {header!r}")
                while size:
                    data = await self._some(min(size, CHUNK))
                    if not data:
                        raise EOFError
                    size -= len(data)
                    yield kind, data

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes to standard input, and its end when they are the last."""
        with self._translated():
            view = memoryview(data)
            for start in range(0, len(data), CHUNK):
                self._writer.write(bytes(view[start : start + CHUNK]))
                await self._writer.drain()
            if last:
                self._writer.write_eof()

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()

    async def _header(self) -> bytes:
        header = b""
        while len(header) < FRAME_HEADER:
            data = await self._some(FRAME_HEADER - len(header))
            if not data and header:
                raise EOFError
            if not data:
                return b""
            header += data
        return header

    async def _some(self, size: int) -> bytes:
        """Return some bytes of the body, none at its end."""
        if not self._chunked:
            return await self._reader.read(size)
        if not self._left:
            line = await self._reader.readline()
            self._left = int(line.split(b";")[0], 16) if line else 0
            if not self._left:
                return b""
        data = await self._reader.read(min(size, self._left))
        self._left -= len(data)
        if not self._left:
            await self._reader.readexactly(2)
        return data

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, ValueError) as error:  # an incomplete read is an EOFError
            raise EngineError(f"the stream of {self._where} broke off: {error or 'in the middle'}") from error


class Engine:
    """The daemon at one address. For one event loop; `close` it.

    Args:
        host: Its address, from `daemon_host`.
        timeout_s: Seconds that it may take for an answer.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self.host, self.timeout_s = host, timeout_s
        self.where = f"the Docker daemon at {host}"
        parts = urlsplit(host)
        self._socket = parts.path if parts.scheme == "unix" else None
        self._address = (parts.hostname or "docker", parts.port or 2375)
        self._base = ""
        self._session: aiohttp.ClientSession | None = None

    async def negotiate(self) -> None:
        """Agree with the daemon on a version of the API.

        Raises:
            EngineError: When it can't be reached, is too old, or runs no Linux containers.
        """
        about = await self.call("GET", "/version")
        try:
            theirs = _version(about["ApiVersion"])
            least = _version(about.get("MinAPIVersion") or "1.0")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self.where} does not say which API it speaks: {about!r}"[:500]) from error
        if theirs < OLDEST_VERSION or about.get("Os", "linux") != "linux":
            raise EngineError(
                f"{self.where} speaks API {about['ApiVersion']} for {about.get('Os')} containers; "
                f"sandboxes need at least {_spelled(OLDEST_VERSION)} for linux"
            )
        self._base = f"/v{_spelled(max(least, min(theirs, OUR_VERSION)))}"

    async def call(
        self, method: str, path: str, params: Mapping[str, Any] | None = None, body: Any = None, timeout_s: float = 0
    ) -> Any:
        """Return a call's answer, read as JSON; None where it is empty."""
        with self._translated(timeout_s or self.timeout_s):
            async with asyncio.timeout(timeout_s or self.timeout_s):
                async with self._opened(method, path, params, json=body) as response:
                    text = await response.read()
            return json.loads(text) if text.strip() else None

    @contextlib.asynccontextmanager
    async def opened(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None = None,
        data: AsyncIterator[bytes] | None = None,
        *,
        patient: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make a call whose answer, or body, is a stream; a patient one lets the daemon pause as long as it likes."""
        with self._translated(self.timeout_s):
            async with contextlib.AsyncExitStack() as stack:
                if data is None:
                    yield await stack.enter_async_context(
                        self._opened(method, path, params, timeout=self._limits(patient))
                    )
                    return
                # The client's own limits do not see a daemon that stops reading.
                limit = await stack.enter_async_context(asyncio.timeout(self.timeout_s))
                watched = self._watched(data, limit)
                yield await stack.enter_async_context(self._opened(method, path, params, data=watched))

    async def _watched(self, data: AsyncIterator[bytes], limit: asyncio.Timeout) -> AsyncIterator[bytes]:
        async for part in data:
            limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)
            yield part

    async def stream(self, path: str, params: Mapping[str, Any] | None = None, body: Any = None) -> Stream:
        """Make a call that turns into a stream (attach, or the start of an exec)."""
        content = json.dumps(body).encode() if body is not None else b""
        head = (
            f"POST {self._target(path, params)} HTTP/1.1\r\nHost: {self._address[0]}\r\nConnection: Upgrade\r\n"
            f"Upgrade: tcp\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer = None
        try:
            with self._translated(self.timeout_s):
                async with asyncio.timeout(self.timeout_s):
                    if self._socket is not None:
                        reader, writer = await asyncio.open_unix_connection(self._socket)
                    else:
                        reader, writer = await asyncio.open_connection(*self._address)
                    writer.write(head.encode() + content)
                    return await self._taken_over(reader, writer)
        except BaseException:
            if writer is not None:
                writer.transport.abort()
            raise

    async def _taken_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        chunked = headers.get("transfer-encoding") == "chunked"
        stream = Stream(reader, writer, chunked=chunked, where=self.where)
        if status in (101, 200):
            return stream
        text = b""
        size = min(int(headers.get("content-length", MAX_ERROR_BYTES)), MAX_ERROR_BYTES)
        while len(text) < size and (data := await stream._some(size - len(text))):
            text += data
        raise self._refusal(status, text)

    async def close(self) -> None:
        """Close its connections. Twice is fine."""
        if self._session is not None:
            await self._session.close()

    @contextlib.asynccontextmanager
    async def _opened(
        self, method: str, path: str, params: Mapping[str, Any] | None, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None or self._session.closed:
            # A connection for each call: one that was kept may have been closed by the other side, and a call that
            # finds out by failing can't be told from one that was carried out.
            keep: dict[str, Any] = {"force_close": True, "limit": 0}
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._socket, **keep) if self._socket else aiohttp.TCPConnector(**keep),
                timeout=self._limits(patient=False),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        host, port = self._address
        url = URL(f"http://{f'[{host}]' if ':' in host else host}:{port}{self._target(path, params)}", encoded=True)
        async with self._session.request(method, url, **more) as response:
            if response.status >= 300:  # no redirect is part of the API
                raise self._refusal(response.status, await response.content.read(MAX_ERROR_BYTES))
            yield response
            # A body that was not read to its end is dropped with its connection on leaving.

    def _limits(self, patient: bool) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=None, connect=self.timeout_s, sock_read=None if patient else self.timeout_s)

    def _target(self, path: str, params: Mapping[str, Any] | None) -> str:
        query = f"?{urlencode(params, quote_via=quote)}" if params else ""
        return f"{self._base}{quote(path, safe='/:@')}{query}"

    def _refusal(self, status: int, body: bytes) -> EngineError:
        message = body.decode(errors="replace").strip()[:1000]
        with contextlib.suppress(ValueError, TypeError, KeyError):
            message = str(json.loads(body)["message"])
        return EngineError(f"{self.where}: {message or 'no reason given'} (HTTP {status})", status)

    @contextlib.contextmanager
    def _translated(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except SandboxError:
            raise
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise self._unreachable(str(getattr(error, "strerror", None) or error)) from error
        except TimeoutError as error:
            raise EngineError(f"{self.where} did not answer within {timeout_s:g} s") from error
        except (FileNotFoundError, PermissionError, ConnectionRefusedError) as error:
            raise self._unreachable(error.strerror or str(error)) from error
        except (aiohttp.ClientError, EOFError, OSError) as error:
            raise EngineError(f"the answer of {self.where} broke off: {error or type(error).__name__}") from error
        except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise EngineError(f"{self.where} gave an answer that makes no sense: {error}") from error

    def _unreachable(self, reason: str) -> EngineError:
        hint = "is it running, may this user use it, is DOCKER_HOST (or host of the docker sandbox provider) right?"
        return EngineError(f"{self.where} can't be reached: {reason}; {hint}", sent=False)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _spelled(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
