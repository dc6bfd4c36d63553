"""No token, cookie or secret gets into a log, however it got into what is logged."""

from __future__ import annotations

import json
import string
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings, strategies as st
from itsdangerous import TimestampSigner

from nemo_gym.logs import Redactor, beginning_of
from nemo_gym.logs.redaction import secrets_of_environment
from nemo_gym.server.client import cookie_header
from nemo_gym.server.session_signing import SessionSerializer
from nemo_gym.session_routing import SessionCookies
from tests.unit_tests.logs.log_writing import Written

# What no line has by itself.
secrets = st.text(min_size=6, max_size=60).map(lambda text: f"Zq{text}9x")
sessions = st.dictionaries(st.text(), st.text() | st.integers(), max_size=4).map(
    lambda session: {"session_id": "0" * 32, **session}
)
few = settings(max_examples=25, deadline=None)
url_safe = st.text(string.ascii_letters + string.digits + "-_", min_size=8, max_size=60)


class CarryingError(Exception):
    """Has a secret in its text, its notes, and what it was raised from."""

    def __init__(self, secret: str) -> None:
        super().__init__(f"called with {secret}", {"key": secret})
        self.add_note(f"while {secret} was in use")


def log_in_every_way(written: Written, secret: str) -> None:
    logger = written.logger
    logger.error("with %s", secret)
    logger.error("with %r and %s", secret, json.dumps({"value": secret}))
    logger.error("GET /?key=%s", quote(secret.encode("utf-8", "replace")))
    logger.error("%s", secret.encode("utf-8", "replace"))
    logger.error("called", extra={"secret": secret}, stack_info=True)
    try:
        try:
            raise KeyError(secret)
        except KeyError as error:
            raise CarryingError(secret) from error
    except CarryingError:
        logger.exception("failed: %s", secret)
    try:
        raise ExceptionGroup(secret, [CarryingError(secret)])
    except ExceptionGroup:
        logger.exception("failed")


def strings_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for child in value.values() for text in strings_in(child)]
    return [value] if isinstance(value, str) else []


@few
@given(secrets)
def test_a_configured_secret_appears_in_no_form(secret: str) -> None:
    forms = {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret.encode("utf-8", "replace"))}
    written = Written(redact=Redactor([secret]))
    log_in_every_way(written, secret)
    assert not [form for form in forms if form in written.text]
    as_json = Written("json", redact=Redactor([secret]))
    log_in_every_way(as_json, secret)
    found = [text for line in as_json.lines for text in strings_in(json.loads(line))]
    assert not [text for text in [*found, as_json.text] for form in forms if form in text]


@few
@given(sessions, st.text(string.ascii_letters, min_size=1), st.text(string.ascii_letters + "_-.", min_size=1))
def test_a_session_cookie_appears_in_no_form(session: dict[str, Any], server_class: str, name: str) -> None:
    cookie = f"{server_class}___{name}"
    value = SessionCookies(cookie, ["a secret of the server"]).sign(session)
    payload, _, signature = value.rsplit(".", 2)
    written = Written()
    log_in_every_way(written, value)
    written.logger.error("headers: %s", {"Cookie": cookie_header({cookie: value}), "other": "kept"})
    written.logger.error("headers: %s", [(b"cookie", f"{cookie}={value}".encode()), (b"other", b"kept")])
    written.logger.error("Set-Cookie: %s=%s; path=/; httponly", cookie, value)
    written.logger.error("%s", {cookie: value})
    written.logger.error("cut off: %s", f"{cookie}={value}"[:-3])
    assert signature not in written.text
    assert signature[:-3] not in written.text
    assert payload not in written.text
    assert "kept" in written.text


@few
@given(st.text(min_size=1, max_size=40))
def test_what_a_session_cookie_is_set_to_is_not_shown_whatever_it_is(value: str) -> None:
    written = Written()
    sent = cookie_header({"Counter___counter": "Zq9" + value.replace("\0", "")})
    written.logger.error("sent %s to it", sent)
    assert "Zq9" not in written.text
    assert "Counter___counter=" in written.text


@few
@given(st.text(min_size=1, max_size=200))
def test_an_mcp_session_token_appears_in_no_form(session: str) -> None:
    token = str(SessionSerializer(["a secret of the server"], salt="token").dumps({"sid": session, "tools": None}))
    written = Written()
    log_in_every_way(written, token)
    assert token.rsplit(".", 1)[1] not in written.text
    assert token.split(".")[-3] not in written.text


@few
@given(url_safe)
def test_keys_and_credentials_are_known_by_their_looks(key: str) -> None:
    key = f"Zq9{key}"
    written = Written()
    for text in (
        f"Authorization: Bearer {key}",
        f"authorization: Basic {key}==",
        str({"Authorization": f"Bearer {key}"}),
        str([(b"authorization", f"Bearer {key}".encode())]),
        json.dumps({"headers": {"X-Api-Key": key}}),
        f"api_key=sk-{key} was refused",
        f"the key sk-{key} was refused",
        f"incorrect key nvapi-{key}",
        f"policy_api_key={key}",
        f"{{'policy_api_key': '{key}'}}",
        f"https://user:{key}@models.example/v1",
        f"?access_token={key}&page=1",
        f"NEMO-Gym-MCP-Session-Token: {key}",
    ):
        written.logger.error("%s", text)
        assert key not in written.texts[-1], text


@pytest.mark.parametrize(
    "text",
    [
        "policy_api_key: expected text\nPut the value in quotes.",
        "session_secret: expected a text of at least 16 characters, or a list of such, newest first",
        "worker 0123456789abcdef0123456789abcdef is no longer running",
        "counter: POST /increment_counter: 410, the session is lost: start a new session",
        "a task-manager asked for max_output_tokens=4096 and risk-adjusted results",
        "invalid session cookie: bad signature",
        "http://127.0.0.1:8000/v1/responses answered 500: user@example.com is unknown",
        "resources_servers/counter/app.py:31: the tokens are counted: 12, 13",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert Redactor(["a-real-secret"])(text) == text


@few
@given(st.text(max_size=300), st.lists(secrets, max_size=3))
def test_what_is_redacted_once_is_redacted(text: str, known: list[str]) -> None:
    redact = Redactor(known)
    once = redact(text + "".join(known))
    assert not [secret for secret in known if secret in once]


def test_a_short_value_is_not_looked_for() -> None:
    assert Redactor(["EMPTY", "dummy"])("the list is EMPTY, a dummy") == "the list is EMPTY, a dummy"


def test_of_secrets_that_hold_each_other_nothing_is_left() -> None:
    redact = Redactor(["correct-horse", "correct-horse-battery", "battery-staple"])
    assert redact("correct-horse-battery correct-horse battery-staple") == "*** *** ***"


def test_the_environments_secrets_are_known_by_their_names() -> None:
    found = secrets_of_environment(
        {"OPENAI_API_KEY": "key-1", "HF_TOKEN": "key-2", "NEMO_GYM_SESSION_SECRET": "new,old", "HOME": "/root"}
    )
    assert {"key-1", "key-2", "new", "old"} <= found
    assert "/root" not in found


def test_a_signed_value_of_another_library_is_known_too() -> None:
    signed = TimestampSigner("secret").sign(b"eyJzZXNzaW9uIjogMX0=").decode()
    assert Redactor()(f"got {signed}.") in ("got ***", "got ***.")


@pytest.mark.parametrize(
    "text",
    [
        "_" * 100_000,
        "a___" * 30_000,
        "a-b___c.d" * 15_000,
        "cookie:" * 20_000,
        "cookie" + " " * 100_000,
        "token='\\\n" * 15_000,
        "ab://" * 25_000,
    ],
)
def test_no_text_that_a_client_can_send_takes_long_to_look_through(text: str) -> None:
    # Each of these took minutes where a pattern tried all ways to match: the test would not end.
    assert Redactor(["a-real-secret"])(text)


@pytest.mark.parametrize(
    "text",
    [
        'token="Zq9secret\\\nZq9more"',
        r'{"body": "{\"api_key\": \"Zq9secret\"}"}',
        r'"{\"x-api-key\": \"Zq9secret\"}"',
        "https://user:Zq9@Zq9@host/x",
        "Foo___bar%3DZq9secret; ",
        "GET /?access_token%3DZq9secret",
        "AWS_SECRET_ACCESS_KEY=Zq9secretsecret",
        "{'private_key': 'Zq9secret'}",
        "glpat-Zq9secretsecret",
    ],
)
def test_a_secret_is_known_by_its_looks_in_unusual_places(text: str) -> None:
    assert "Zq9" not in Redactor()(text)


def test_a_secret_is_known_where_it_is_percent_encoded_in_small_letters() -> None:
    assert Redactor(["a real/secret+key"])("a%20real%2fsecret%2bkey a+real%2fsecret%2bkey") == "*** ***"


def test_no_half_of_a_secret_is_left_where_a_text_is_cut_off() -> None:
    secret = "a-real-secret-0123456789"
    for room in range(len(secret) + 2):
        beginning = beginning_of(f"{'x ' * 50}{secret}{' x' * 50}", 100 + room)
        assert "a-" not in beginning.replace(secret, "***")
    assert beginning_of("short", 5) == "short"
    assert Redactor([secret])("x " * 32_765 + secret + " x" * 40_000).count("real") == 0
    assert len(beginning_of("x" * 100_000, 50_000)) >= 40_000
