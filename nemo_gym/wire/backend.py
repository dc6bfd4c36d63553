"""The client of a model backend: an OpenAI-compatible service, reached over HTTP.

A model call may be repeated, unlike a tool call: it changes nothing but the bill. So this client tries again
after an answer that says "later" (429, 5xx) and after a connection that failed, and gives up after
`max_retries`. An attempt that ran out of time is not repeated, because a backend that is too slow does not
get faster by asking twice.

The connections belong to the event loop that first used them. A client used from another loop (as tests do)
opens new ones there. Close it with `aclose()`.
"""

import asyncio
import base64
import contextlib
import math
import os
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson
from pydantic import BaseModel, Field, PrivateAttr
from yarl import URL

from nemo_gym.errors import ModelBackendError

MAX_NUM_TRIES: Final = 3
RATE_LIMIT_ERROR_CODES: Final = frozenset({429, 503, 529})
"""Statuses by which backends say that they have too much to do."""
RETRY_ERROR_CODES: Final = RATE_LIMIT_ERROR_CODES | {408, 500, 502, 504, 520, 522, 524}
"""Statuses after which the same request may succeed."""

_EXCERPT_CHARS: Final = 2000
_KEEPALIVE_S: Final = 60


class NeMoGymAsyncOpenAI(BaseModel):
    """A client for one OpenAI-compatible backend.

    Args:
        base_url: Where the API is, with its version prefix: `https://api.openai.com/v1`. A user and password
            in it are sent as basic authentication when there is no `api_key`.
        api_key: Sent as a bearer token; never part of a log line or an error.
        max_retries: How often a failed attempt is repeated.
        timeout_s: Seconds one attempt may take, from the first byte sent to the last received; None for no
            limit.
        connect_timeout_s: Seconds opening a connection may take.
        max_concurrency: How many calls may be under way at once; more wait for their turn. None for no limit.
        retry_delay_s: Seconds before the first repetition; doubled each time, less up to half at random.
        max_retry_delay_s: The longest wait between attempts, in seconds. A backend that asks for more by
            `Retry-After` is not asked again.
        use_env_proxy: Whether to go through the proxy that `HTTPS_PROXY` and its relatives name.
        default_headers: Headers sent with every request.
    """

    base_url: str
    api_key: str = Field(default="", repr=False)
    max_retries: int = Field(default=MAX_NUM_TRIES - 1, ge=0)
    timeout_s: float | None = Field(default=600.0, gt=0)
    connect_timeout_s: float = Field(default=10.0, gt=0)
    max_concurrency: int | None = Field(default=None, ge=1)
    retry_delay_s: float = Field(default=0.5, gt=0)
    max_retry_delay_s: float = Field(default=60.0, gt=0)
    use_env_proxy: bool = False
    default_headers: dict[str, str] = Field(default_factory=dict, repr=False)

    _session: aiohttp.ClientSession | None = PrivateAttr(default=None)
    _slots: asyncio.Semaphore | None = PrivateAttr(default=None)
    _loop: asyncio.AbstractEventLoop | None = PrivateAttr(default=None)

    async def create_response(self, **params: Any) -> dict[str, Any]:
        """POST a Responses API request and return the reply.

        Raises:
            ModelBackendError: When there is no usable reply.
        """
        return await self.post("responses", params)

    async def create_chat_completion(self, **params: Any) -> dict[str, Any]:
        """POST a Chat Completions request and return the reply.

        Raises:
            ModelBackendError: When there is no usable reply.
        """
        return await self.post("chat/completions", params)

    async def post(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """POST `payload` as JSON to `path` under the base URL and return the JSON object of the reply.

        Raises:
            ModelBackendError: When there is no usable reply.
        """
        self._bind_to_loop()
        body = orjson.dumps(payload, default=_as_json)
        if self._slots is None:
            return await self._post_with_retries(path, body)
        async with self._slots:
            return await self._post_with_retries(path, body)

    def url_of(self, path: str) -> str:
        """Return the address of `path` under the base URL, fit to be shown: without credentials and query."""
        return str(self._address(path)[0].with_query(None))

    async def aclose(self) -> None:
        """Close the connections; a later call opens new ones."""
        session, self._session, self._loop = self._session, None, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> "NeMoGymAsyncOpenAI":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _post_with_retries(self, path: str, body: bytes) -> dict[str, Any]:
        for attempt in range(self.max_retries + 1):
            try:
                return await self._post_once(path, body)
            except ModelBackendError as error:
                delay = self._delay_before_retry(error, attempt)
                if delay is None:
                    error.attempts = attempt + 1
                    raise
            await asyncio.sleep(delay)
        raise AssertionError("the last attempt either returns or raises")

    def _delay_before_retry(self, error: ModelBackendError, attempt: int) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up."""
        if not error.retryable or attempt >= self.max_retries:
            return None
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing
        backoff = min(self.retry_delay_s * 2.0**attempt, self.max_retry_delay_s) * jitter
        if error.retry_after_s is None:
            return backoff
        if error.retry_after_s > self.max_retry_delay_s:
            return None
        # All who were turned away got the same date; they should not all return on it.
        return error.retry_after_s + min(backoff, 0.1 * error.retry_after_s)

    async def _post_once(self, path: str, body: bytes) -> dict[str, Any]:
        url, auth = self._address(path)
        shown = self.url_of(path)
        session = self._open_session()
        try:
            async with session.post(url, data=body, headers=self._headers(auth), allow_redirects=False) as reply:
                content = await reply.read()
                status, headers = reply.status, reply.headers.copy()
        except TimeoutError as error:
            connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
            limit = self.connect_timeout_s if connecting else self.timeout_s
            doing = "accept a connection" if connecting else "answer"
            raise ModelBackendError(
                f"did not {doing} within {limit:g} s", url=shown, timed_out=True, retryable=connecting
            ) from error
        except aiohttp.InvalidURL as error:
            raise ModelBackendError("is not a usable address", url=shown) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ModelBackendError(_failure(error), url=shown, retryable=True) from error
        if status != HTTPStatus.OK:
            raise self._refusal(status, headers, content, shown)
        return self._parse(content, shown)

    def _refusal(self, status: int, headers: Mapping[str, str], content: bytes, url: str) -> ModelBackendError:
        said = self._excerpt(content)
        problem = f"answered {status}"
        if location := headers.get("Location"):
            problem += f" and points to {URL(location).with_user(None).with_query(None)}; change the base URL"
        return ModelBackendError(
            f"{problem}: {self._redacted(_message(content, said))}" if said else problem,
            url=url,
            status=status,
            body=said,
            retryable=status in RETRY_ERROR_CODES,
            retry_after_s=parse_retry_after(headers),
        )

    def _parse(self, content: bytes, url: str) -> dict[str, Any]:
        try:
            parsed = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            said = self._excerpt(content)
            raise ModelBackendError(
                f"answered 200 with a body that is not JSON ({error}): {said}", url=url, status=200, body=said
            ) from error
        if not isinstance(parsed, dict):
            said = self._excerpt(content)
            raise ModelBackendError(
                f"answered 200 with JSON that is not an object: {said}", url=url, status=200, body=said
            )
        return parsed

    def _excerpt(self, content: bytes) -> str:
        text = self._redacted(content.decode(errors="replace").strip())
        return text if len(text) <= _EXCERPT_CHARS else f"{text[:_EXCERPT_CHARS]}..."

    def _redacted(self, text: str) -> str:
        return text.replace(self.api_key, "***") if self.api_key else text

    def _address(self, path: str) -> tuple[URL, str | None]:
        """Return the URL without credentials, and the basic authentication that was in it."""
        base = URL(self.base_url)
        auth = None
        if base.user:
            pair = f"{base.user}:{base.password or ''}"
            auth = f"Basic {base64.b64encode(pair.encode()).decode()}"
        base = base.with_user(None) if base.host else base
        return base / path, auth

    def _headers(self, basic_auth: str | None) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", **self.default_headers}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        elif basic_auth:
            headers["Authorization"] = basic_auth
        return headers

    def _bind_to_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._session is not None:
            # Its loop is gone or busy elsewhere, so it can't be closed from here.
            self._session.detach()
        self._loop, self._session = loop, None
        self._slots = asyncio.Semaphore(self.max_concurrency) if self.max_concurrency else None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                # No limit here: waiting for a connection would use up the attempt's time.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Not `trust_env`, which would read the user's netrc as well and refuse to mix it with our key.
                proxy=_environment_proxy(URL(self.base_url)) if self.use_env_proxy else None,
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=self.connect_timeout_s),
            )
        return self._session


def parse_retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Return the seconds a reply asks to wait, or None where it does not say.

    Understands `Retry-After` as seconds or as an HTTP date (RFC 9110 section 10.2.3), and the
    `retry-after-ms` that OpenAI and Azure send.

    Args:
        headers: The reply's headers.
        now: Seconds since the epoch; the clock when None.
    """
    for name, unit in (("retry-after-ms", 0.001), ("Retry-After", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        with contextlib.suppress(ValueError):
            seconds = float(value) * unit
            return max(0.0, seconds) if math.isfinite(seconds) else None
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            continue
        return max(0.0, date.timestamp() - (time.time() if now is None else now))
    return None


def _environment_proxy(url: URL) -> str | None:
    """Return the proxy that the environment names for `url`."""
    if url.host is None or proxy_bypass(url.host):
        return None
    return getproxies().get(url.scheme)


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _failure(error: Exception) -> str:
    """Say in words what happened to the connection."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"can't be found: {error.os_error.strerror}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"has a certificate that can't be trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"can't be reached: {os.strerror(number) if number else error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "closed the connection in the middle of its answer"
    return f"broke the connection: {error or type(error).__name__}"


def _message(content: bytes, fallback: str) -> str:
    """Return the words of an error body: `error.message`, `message` or `detail`, else all of it."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return fallback
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, str):
        return error
    for key in ("message", "detail"):
        if isinstance(error, dict) and isinstance(error.get(key), str):
            return str(error[key])
    return fallback
