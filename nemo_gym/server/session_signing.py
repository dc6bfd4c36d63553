"""What names a session beside its cookie is signed with the cookie's keys, and is valid for as long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from itsdangerous import URLSafeTimedSerializer

from nemo_gym.session_routing.session_cookie import FOURTEEN_DAYS


class SessionSerializer(URLSafeTimedSerializer):
    """Signs and reads the names of sessions; one older than a session cookie may be is refused as expired.

    Args:
        session_keys: The server's session keys: the first signs, all of them verify.
        salt: Sets one kind of name apart from all others that these keys sign.
    """

    def __init__(self, session_keys: Sequence[str], *, salt: str) -> None:
        # itsdangerous signs with the last key, and verifies with all.
        keys = list(reversed(session_keys))
        # In ASCII, as the session cookie: a session may hold what UTF-8 can't encode.
        super().__init__(keys, salt=salt, serializer_kwargs={"ensure_ascii": True})

    def loads(  # type: ignore[override]
        self, s: str | bytes, max_age: int | None = FOURTEEN_DAYS, return_timestamp: bool = False, salt: Any = None
    ) -> Any:
        """Return the payload of the signed text `s`.

        Raises:
            itsdangerous.SignatureExpired: If it is older than `max_age` seconds, or dated in the future.
            itsdangerous.BadData: If it was not made by this server.
        """
        return super().loads(s, max_age=max_age, return_timestamp=return_timestamp, salt=salt)
