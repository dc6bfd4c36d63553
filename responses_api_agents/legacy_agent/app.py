"""A relay in front of another agent: its routes pass through unchanged, unread.

It stands where an agent is called by a name that is no longer the real one's, or where the two sides' contracts are
not this framework's to know: the body goes on as bytes and the reply comes back as bytes, with its status and its
headers, repeated ones included. Only headers that belong to one connection are each hop's own (RFC 9110, section
7.6.1). The relay keeps no session and sets no cookie of its own.
"""

from collections.abc import AsyncIterator, Iterable
from typing import ClassVar, Final

import aiohttp
from fastapi import FastAPI, HTTPException, Request
from starlette.responses import Response, StreamingResponse

from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import AgentServerRef
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_CHUNK_BYTES: Final = 64 * 1024
_REQUEST_HOPS: Final = frozenset({"host", "expect"})
# The server that this relay runs in sets these itself.
_ANSWERED_BY_EVERY_SERVER: Final = frozenset({"date", "server"})
_ADDED_BY_CLIENT: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class LegacyAgentConfig(BaseResponsesAPIAgentConfig):
    """The settings of the relay.

    Attributes:
        agent_server: The agent that does the work.
    """

    agent_server: AgentServerRef


class LegacyAgent(SimpleResponsesAPIAgent):
    """Hands requests on to another agent, and its replies back."""

    routes_sessions: ClassVar[bool] = False

    config: LegacyAgentConfig

    def setup_session_middleware(self, app: FastAPI) -> None:
        """Add nothing: the sessions are the other agent's."""

    async def run(self, request: Request) -> Response:  # type: ignore[override]
        """Relay a rollout."""
        return await self._relay(request)

    async def responses(self, request: Request) -> Response:  # type: ignore[override]
        """Relay a request for a response."""
        return await self._relay(request)

    async def aggregate_metrics(self, request: Request) -> Response:  # type: ignore[override]
        """Relay the summing up of results."""
        return await self._relay(request)

    async def _relay(self, request: Request) -> Response:
        name = self.config.agent_server.name
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        try:
            upstream = await self.server_client.post(
                server_name=name,
                url_path=path,
                data=request.stream() if has_body else None,
                headers=_joined(_end_to_end(request.headers.raw, without=_REQUEST_HOPS)),
                skip_auto_headers=_ADDED_BY_CLIENT,
                auto_decompress=False,
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            raise HTTPException(502, f"agent '{name}' gave no reply: {error}") from error
        reply = StreamingResponse(_body_of(upstream), status_code=upstream.status)
        reply.raw_headers = _end_to_end(upstream.raw_headers, without=_ANSWERED_BY_EVERY_SERVER)
        return reply


async def _body_of(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the reply's bytes; where the caller has gone away, break off the connection to the agent as well."""
    async with upstream:
        async for chunk in upstream.content.iter_chunked(_CHUNK_BYTES):
            yield chunk


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], *, without: frozenset[str]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are not for one connection only, in order, with names in lower case as ASGI wants."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        option.strip().lower()
        for name, value in lowered
        if name == b"connection"
        for option in value.decode("latin-1").split(",")
    }
    dropped = _HOP_BY_HOP | named | without
    return [(name, value) for name, value in lowered if name.decode("latin-1") not in dropped]


def _joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return request headers by name; one that is repeated means the same as its values in a list (RFC 9110, 5.3)."""
    result: dict[str, str] = {}
    for name, value in ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers):
        separator = "; " if name == "cookie" else ", "
        result[name] = f"{result[name]}{separator}{value}" if name in result else value
    return result


if __name__ == "__main__":
    LegacyAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = LegacyAgent.run_webserver()
