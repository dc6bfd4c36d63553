"""Takes secrets out of a text, by their values where those are known and by their looks where they are not.

It stands at the last door, where a record has become text, so that it sees what was formatted, chained and
represented on the way. It is meant for text that is seldom written; it costs some microseconds a line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from urllib.parse import quote, quote_plus

MASK: Final = "***"
SHORTEST_SECRET: Final = 8
"""Values shorter than this (`EMPTY`, `dummy`) are not looked for: they stand in ordinary words."""

# Nobody reads more of one record, and looking through it takes time on the event loop.
_LONGEST_TEXT: Final = 128 * 1024
_SECRET_NAME: Final = re.compile(
    r"(?:(?:api|access|private|secret)_?key|token|secret|password|passwd)s?\Z", re.IGNORECASE
)
# The patterns give nothing back (`++`) or look no further than so many characters: a client chooses the text, and the
# event loop waits.
# What may stand between the name of a header or setting and its value: in JSON, in JSON within JSON, and in a repr, or
# as `name: value`.
_AFTER_QUOTED: Final = r"""\\{0,9}["']\s*+[:=,]\s*+"""
_AFTER_PLAIN: Final = r"""(?:\s*+[:=]|%3[Dd])\s*+"""
# A value in quotes, also where its end was cut off.
_QUOTED: Final = (
    r"""(?:b?"(?:[^"\\]++|\\[\s\S])*+(?:"|\\?\Z)|b?'(?:[^'\\]++|\\[\s\S])*+(?:'|\\?\Z)"""
    r"""|\\{1,9}"[^"\\]*+|\\{1,9}'[^'\\]*+)"""
)


_ESCAPE: Final = re.compile("%[0-9A-F]{2}")
_PART_OF_WORD: Final = re.compile(r"""[^\s"'<>,;:&=(){}\[\]]{0,1000}+""")


class _Look(NamedTuple):
    """How one kind of secret looks.

    Attributes:
        signs: One of them stands, in lower case, in each text that has such a secret: most have none.
        pattern: The secret, perhaps with what stands around it.
        replacement: What is left of it.
    """

    signs: tuple[str, ...]
    pattern: re.Pattern[str]
    replacement: str


_LOOKS: Final = (
    # What `itsdangerous` signs (session cookies, MCP tokens, ids in bodies) and JSON Web Tokens: base64 of `{"` or `["`
    # first, or of compressed data. Also where the end was cut off.
    _Look((".ej", "eyj", "eyi", "wyj"), re.compile(r"(?:\.eJ|eyJ|eyI|WyJ)[A-Za-z0-9_\-+/=%.]{12,}"), MASK),
    # A session cookie, `<Class>___<name>=<value>`, whatever its value is.
    _Look(
        ("___",),
        re.compile(
            rf"""((?<!_)_{{3,}}+[\w.\-]{{1,200}}+(?:{_AFTER_QUOTED}|{_AFTER_PLAIN}))(?:{_QUOTED}|[^\s;,"'<>]+)"""
        ),
        rf"\g<1>{MASK}",
    ),
    # Headers.
    _Look(
        ("authorization", "api-key", "cookie", "session-token"),
        re.compile(
            r"(\b(?:(?:proxy-)?authorization|(?:x-)?api-key|(?:set-)?cookie|nemo-gym-mcp-session-token)"
            rf"(?:{_AFTER_QUOTED}|{_AFTER_PLAIN}(?=b?[\"']))){_QUOTED}",
            re.IGNORECASE,
        ),
        rf"\g<1>{MASK}",
    ),
    _Look(
        ("cookie",),
        re.compile(rf"(\b(?:set-)?cookie{_AFTER_PLAIN})(?=[^\s;=]{{1,200}}=)[^\r\n\"')\]}}]+", re.IGNORECASE),
        rf"\g<1>{MASK}",
    ),
    _Look(
        ("authorization", "api-key", "session-token"),
        re.compile(
            rf"(\b(?:(?:proxy-)?authorization|(?:x-)?api-key|nemo-gym-mcp-session-token){_AFTER_PLAIN})"
            r"(?:(?:Bearer|Basic|Digest|Token)\s+)?[^\s\"',;)\]}]+",
            re.IGNORECASE,
        ),
        rf"\g<1>{MASK}",
    ),
    _Look(("bearer",), re.compile(r"\b(Bearer)(\s+)[A-Za-z0-9_\-.~+/=]{6,}", re.IGNORECASE), rf"\g<1>\g<2>{MASK}"),
    # Keys of well-known services.
    _Look(("sk-", "pk-", "rk-"), re.compile(r"(?<![A-Za-z0-9_\-])(?:sk|pk|rk)-[A-Za-z0-9_\-]{8,}"), MASK),
    _Look(
        ("nvapi-", "hf_", "gh", "glpat-", "xox", "akia", "aiza"),
        re.compile(r"\b(?:nvapi-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza)[A-Za-z0-9_\-]{10,}"),
        MASK,
    ),
    # `policy_api_key=...`, `'password': '...'`
    _Look(
        ("key", "secret", "passw", "token"),
        re.compile(
            r"""((?:(?:api|access|private|secret)[_-]?key|secret|password|passwd|token)"""
            r"""(?:\\{0,9}["']\s*+:\s*+|\s*+=\s*+|%3[Dd]))"""
            rf"""(?:{_QUOTED}|[^\s"',;&)\]}}]{{8,}})""",
            re.IGNORECASE,
        ),
        rf"\g<1>{MASK}",
    ),
    # `https://user:password@host`
    _Look(("://",), re.compile(r"(\b[a-z][a-z0-9+.\-]{1,20}://)[^\s/\"'?#]+@", re.IGNORECASE), rf"\g<1>{MASK}@"),
)


class Redactor:
    """Replaces secrets by `***`.

    Args:
        secrets: Secrets known by their value; those shorter than `SHORTEST_SECRET` are left out.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        written = {form for secret in secrets if len(secret) >= SHORTEST_SECRET for form in _forms(secret)}
        # The longest first: one may be part of another.
        alternatives = [re.escape(form) for form in sorted(written, key=lambda form: (-len(form), form))]
        self._values = re.compile("|".join(alternatives)) if alternatives else None

    def __call__(self, text: str) -> str:
        """Return `text` without secrets; of a very long one, the beginning and the end."""
        if len(text) > _LONGEST_TEXT:
            half = _LONGEST_TEXT // 2
            text = f"{beginning_of(text, half)} ... {beginning_of(text[::-1], half)[::-1]}"
        if self._values is not None:
            text = self._values.sub(MASK, text)
        lowered = text.lower()
        for look in _LOOKS:
            if any(sign in lowered for sign in look.signs):
                text = look.pattern.sub(look.replacement, text)
        return text


def beginning_of(text: str, limit: int) -> str:
    """Return the beginning of a text that is longer than `limit`, up to a whole word: half of a secret is none."""
    if len(text) <= limit:
        return text
    cut_off = _PART_OF_WORD.match(text[limit - 1 :: -1])
    assert cut_off is not None
    return text[: limit - cut_off.end()]


def secrets_of_environment(environment: Mapping[str, str] | None = None) -> set[str]:
    """Return the values of the environment variables whose names end like a secret's, such as `OPENAI_API_KEY`."""
    variables = os.environ if environment is None else environment
    found = {value for name, value in variables.items() if _SECRET_NAME.search(name)}
    # A list of secrets (`NEMO_GYM_SESSION_SECRET`) is separated by commas.
    return found | {part for value in found for part in value.split(",")}


def _forms(secret: str) -> set[str]:
    """Return the ways in which a secret may stand in a text: whole, by line, and as `repr`, JSON and URLs write it."""
    forms = {
        secret,
        secret.strip(),
        *secret.splitlines(),
        repr(secret)[1:-1],
        json.dumps(secret)[1:-1],
        ascii(secret)[1:-1],
    }
    forms |= {json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret.encode("utf-8", "replace"))[2:-1]}
    encoded = secret.encode("utf-8", "replace")
    in_urls = {quote(encoded), quote(encoded, safe=""), quote_plus(encoded)}
    forms |= in_urls | {_ESCAPE.sub(lambda found: found[0].lower(), form) for form in in_urls}
    return {form for form in forms if len(form) >= SHORTEST_SECRET}
