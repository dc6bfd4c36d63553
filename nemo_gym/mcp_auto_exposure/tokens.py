"""The MCP session token: a session's id, what it may call and who owns it, signed by the server.

MCP clients keep no cookies, so the token does what the session cookie does for others. It is signed with the same
secret under a salt of its own, so that neither can be taken for the other, and is valid for as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from itsdangerous import BadData, SignatureExpired

from nemo_gym.server.middleware import SESSION_ID_KEY
from nemo_gym.server.session_signing import SessionSerializer
from nemo_gym.session_routing import SESSION_OWNER_KEY

TOKEN_HEADER: Final = "X-NeMo-Gym-Session-Token"
"""The request header that carries the token."""

_SALT: Final = "nemo_gym.mcp_session_token"
_SESSION_ID: Final = "sid"
_TOOLS: Final = "tools"
_REST_OF_SESSION: Final = "session"
_NOT_OURS: Final = (
    f"The token in {TOKEN_HEADER} was not signed by this server: it is forged, damaged, or of another server or secret."
)


class HasSessionKeys(Protocol):
    """What signs a token: any server that has sessions."""

    def session_keys(self) -> Sequence[str]:
        """Return the keys of the server's sessions: the first signs, all of them verify."""
        ...


class InvalidTokenError(Exception):
    """Raised when a request's token gives no access to a session. The text is for whoever sent it."""


class ExpiredTokenError(InvalidTokenError):
    """Raised when a token of this server is out of its time: the session is lost."""


@dataclass(frozen=True, slots=True)
class SessionToken:
    """What a token says.

    Attributes:
        session_id: The session.
        tools: Names of the tools it may call; None for all of the server's.
        owner: The worker that holds the session; None where there is one worker only.
        rest_of_session: What else the server had written into the session when it was seeded.
    """

    session_id: str
    tools: frozenset[str] | None = None
    owner: str | None = None
    rest_of_session: Mapping[str, Any] = field(default_factory=dict)

    def allows(self, tool: str) -> bool:
        """Return whether the session may call `tool`."""
        return self.tools is None or tool in self.tools

    def session(self) -> dict[str, Any]:
        """Return the session as its cookie would hold it."""
        session = {**self.rest_of_session, SESSION_ID_KEY: self.session_id}
        if self.owner is not None:
            session[SESSION_OWNER_KEY] = self.owner
        return session

    def payload(self) -> dict[str, Any]:
        """Return what is signed."""
        payload: dict[str, Any] = {
            _SESSION_ID: self.session_id,
            _TOOLS: None if self.tools is None else sorted(self.tools),
        }
        if self.owner is not None:
            payload[SESSION_OWNER_KEY] = self.owner
        if self.rest_of_session:
            payload[_REST_OF_SESSION] = dict(self.rest_of_session)
        return payload


def session_token_serializer(server: HasSessionKeys) -> SessionSerializer:
    """Return what signs and reads a server's tokens: `dumps(payload)`, `loads(token)`.

    The payload is `{"sid", "tools", "nemo_gym_worker"?}`: the session id, the names of the allowed tools (null for
    all), and with several workers the session's owner.
    """
    return SessionSerializer(server.session_keys(), salt=_SALT)


def token_for_session(session: Mapping[str, Any], tools: frozenset[str] | None, owner: str | None) -> SessionToken:
    """Return the token of a session that has just been seeded.

    Args:
        session: The session, as its cookie holds it.
        tools: Names of the tools it may call; None for all.
        owner: The worker it was seeded on; None where there is one worker only.
    """
    rest = {key: value for key, value in session.items() if key not in (SESSION_ID_KEY, SESSION_OWNER_KEY)}
    return SessionToken(session[SESSION_ID_KEY], tools, owner, rest)


def read_token(serializer: SessionSerializer, value: str | None, *, doubled: bool) -> SessionToken:
    """Return what a request's token says.

    Args:
        serializer: Reads the tokens of this server.
        value: The header's value; None where there is none.
        doubled: Whether the request carries more than one such header.

    Raises:
        InvalidTokenError: If it is missing, ambiguous, expired, or was not signed by this server.
    """
    if doubled:
        raise InvalidTokenError(f"There is more than one {TOKEN_HEADER} header; send exactly one.")
    if value is None:
        raise InvalidTokenError(
            f"There is no {TOKEN_HEADER} header. Send the headers that the reply to /seed_session gives under 'mcp'."
        )
    try:
        payload = serializer.loads(value)
    except SignatureExpired:
        raise ExpiredTokenError(f"The token in {TOKEN_HEADER} has expired. Start a new session.") from None
    except (BadData, ValueError, RecursionError):
        raise InvalidTokenError(_NOT_OURS) from None
    if not isinstance(payload, dict) or not isinstance(payload.get(_SESSION_ID), str):
        raise InvalidTokenError(_NOT_OURS)
    tools, owner, rest = payload.get(_TOOLS), payload.get(SESSION_OWNER_KEY), payload.get(_REST_OF_SESSION, {})
    allowed = None if tools is None else frozenset(str(tool) for tool in tools)
    return SessionToken(payload[_SESSION_ID], allowed, owner, rest)
