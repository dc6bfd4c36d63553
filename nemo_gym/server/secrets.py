"""The session secret: where it comes from, and the key each server derives from it.

Anyone who knows the secret can write a session of their own choosing, so it is never a value an outsider can
guess. Configured (`session_secret`, or `NEMO_GYM_SESSION_SECRET`), or else random: made once and kept in a private
file of the user's state directory, so that cookies of an earlier run still verify and can be told that their
session is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nemo_gym.errors import ConfigError
from nemo_gym.global_config import MIN_SECRET_LENGTH, SESSION_SECRET_KEY_NAME
from nemo_gym.paths import state_dir

SESSION_SECRET_ENV: Final = "NEMO_GYM_SESSION_SECRET"

_FILE_NAME: Final = "session_secret"


def session_secrets(global_config: Mapping[str, Any]) -> list[str]:
    """Return the session secrets: the first signs, all of them verify.

    Args:
        global_config: The resolved configuration. Its `session_secret` is one secret or a list of them, newest
            first; `NEMO_GYM_SESSION_SECRET` holds one, or several separated by commas.

    Raises:
        ConfigError: If a configured secret is no text or is shorter than 16 characters.
    """
    configured = global_config.get(SESSION_SECRET_KEY_NAME)
    if configured is not None:
        several = isinstance(configured, Sequence) and not isinstance(configured, str) and len(configured) > 0
        return [_checked(value, SESSION_SECRET_KEY_NAME) for value in (configured if several else [configured])]
    from_environment = [part for part in os.environ.get(SESSION_SECRET_ENV, "").split(",") if part]
    if from_environment:
        return [_checked(value, SESSION_SECRET_ENV) for value in from_environment]
    return [_kept_secret(state_dir() / _FILE_NAME)]


def derive_session_key(secret: str, cookie_name: str) -> str:
    """Return the key that signs one server's cookies: HMAC-SHA256 (RFC 2104) of the cookie's name.

    A cookie of one server therefore never verifies at another.
    """
    return hmac.new(secret.encode(), cookie_name.encode(), hashlib.sha256).hexdigest()


def _checked(value: object, key: str) -> str:
    if not isinstance(value, str) or len(value) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"expected a text of at least {MIN_SECRET_LENGTH} characters that nobody can guess",
            key=key,
            hint="Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return value


def _kept_secret(path: Path) -> str:
    """Return the secret in `path`, made if there is none; many processes may ask at once."""
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(secrets.token_urlsafe(32))
        # A link to the finished file: whoever is first wins, and nobody reads half a secret.
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
        Path(file.name).unlink()
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            "the session secret must be a regular file that only you can read",
            source=path,
            hint=f"Remove it (running sessions are lost), or: chown $USER {path} && chmod 600 {path}",
        )
    return _checked(path.read_text().strip(), str(path))
