"""The session middleware of Gym's servers keeps to Starlette's: each request is made to both."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import itsdangerous
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message

from nemo_gym.session_routing import SessionCookieMiddleware, SessionCookies, install_session_routing
from tests.session_workers import COOKIE, FORTNIGHT, SECRET, owned_cookie, signed_cookie

FLAT = {"session_id": "b" * 32, "count": 3, "ratio": 0.5, "on": True, "none": None, "text": "é\ud800\n"}
NESTED = {"session_id": "c" * 32, "list": [1, {"a": 2}], "mapping": {"x": []}}


def changed_signature(cookie: str) -> str:
    """Return the cookie with the same signature written in another way: the last character has bits to spare."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    return cookie[:-1] + alphabet[alphabet.index(cookie[-1]) ^ 1]


COOKIES: dict[str, list[str]] = {
    "none": [],
    "flat": [signed_cookie(FLAT)],
    "nested": [signed_cookie(NESTED)],
    "empty": [signed_cookie({})],
    "forged": [signed_cookie(FLAT, secret="another secret")],
    "cut off": [signed_cookie(FLAT)[:-4]],
    "longer": [signed_cookie(FLAT) + "A"],
    "padded": [signed_cookie(FLAT) + "="],
    "written in another way": [changed_signature(signed_cookie(FLAT))],
    "no signature": [f"{COOKIE}={base64.b64encode(json.dumps(FLAT).encode()).decode()}"],
    "no date": [f"{COOKIE}={itsdangerous.Signer(SECRET, b'itsdangerous.Signer').sign(b'e30=').decode()}"],
    "one dot": [f"{COOKIE}=."],
    "blank": [f"{COOKIE}="],
    "only a name": [COOKIE],
    "not ASCII": [f"{COOKIE}=é.é.é"],
    "nearly too old": [signed_cookie(FLAT, age=FORTNIGHT - 30)],
    "too old": [signed_cookie(FLAT, age=FORTNIGHT + 30)],
    "of the future": [signed_cookie(FLAT, age=-3600)],
    "very long ago": [signed_cookie(FLAT, age=10**9)],
    "among others": [f"a=1; {signed_cookie(FLAT)}; b=2"],
    "quoted": [f'{COOKIE}="{signed_cookie(FLAT).partition("=")[2]}"'],
    "twice in a header": [f"{signed_cookie(FLAT)}; {signed_cookie(NESTED)}"],
    "in two headers": [signed_cookie(FLAT), signed_cookie(NESTED)],
    "with another header": [signed_cookie(FLAT), "a=1"],
    "a name like it": [f"{COOKIE}2=x; x{COOKIE}=y"],
    "long": [signed_cookie({"text": "x" * 20_000})],
}


def leave(request: Request) -> None:
    pass


def look(request: Request) -> None:
    assert "x" not in request.session


def write(request: Request) -> None:
    request.session["count"] = 4


def write_text(request: Request) -> None:
    request.session.update({"é": "ü\ud800", "number": 2**70, "nan": float("inf")})


def change_within(request: Request) -> None:
    request.session.get("list", []).append(5)


def change_within_and_write(request: Request) -> None:
    request.session.get("list", []).append(5)
    request.session["count"] = 4


def clear(request: Request) -> None:
    request.session.clear()


def take(request: Request) -> None:
    request.session.pop("session_id", None)
    request.session.pop("nothing", None)


def read_by_the_scope(request: Request) -> None:
    assert request.scope["session"] is not None


ACTIONS = (leave, look, write, write_text, change_within, change_within_and_write, clear, take, read_by_the_scope)


def make_app(cls: type[SessionMiddleware], act: Callable[[Request], None], **options: Any) -> Starlette:
    async def handle(request: Request) -> Response:
        before = json.dumps(request.scope["session"])
        act(request)
        vary = {"vary": "Accept"} if "vary" in request.query_params else {}
        return PlainTextResponse(before, headers=vary)

    middleware = Middleware(cls, secret_key=SECRET, session_cookie=COOKIE, **options)
    return Starlette(routes=[Route("/", handle)], middleware=[middleware])


async def ask(app: Starlette, cookies: list[str], query: bytes = b"") -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of the reply."""
    headers = [(b"host", b"t"), *((b"cookie", cookie.encode("latin-1")) for cookie in cookies)]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "query_string": query}
    replied: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        replied.append(message)

    await app(scope, receive, send)
    return list(replied[0]["headers"]), replied[1]["body"]


def said(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, Any]]:
    """Return the headers with what a session cookie says in the place of its value; when it was signed may differ."""
    found: list[tuple[bytes, Any]] = []
    for name, value in headers:
        cookie, _, attributes = value.partition(b";")
        signed = cookie.partition(b"=")[2]
        if name == b"set-cookie" and signed != b"null":
            payload = itsdangerous.TimestampSigner(SECRET).unsign(signed, max_age=60)
            found.append((name, (base64.b64decode(payload), attributes)))
        else:
            found.append((name, value))
    return found


@pytest.mark.parametrize("name", COOKIES)
@pytest.mark.promise("same-cookie-as-starlette")
async def test_what_a_cookie_says_and_what_the_reply_sets_are_starlettes(name: str) -> None:
    for act in ACTIONS:
        for options in ({}, {"max_age": None}, {"max_age": 60}):
            theirs, ours = (make_app(cls, act, **options) for cls in (SessionMiddleware, SessionCookieMiddleware))
            for query in (b"", b"vary=1", b""):
                expected_headers, expected = await ask(theirs, COOKIES[name], query)
                headers, body = await ask(ours, COOKIES[name], query)
                assert body == expected, act
                assert said(headers) == said(expected_headers), act


@pytest.mark.parametrize("session", [FLAT, NESTED], ids=["flat", "nested"])
async def test_a_remembered_session_is_each_requests_own(session: dict[str, Any]) -> None:
    def spoil(request: Request) -> None:
        request.scope["session"].get("list", []).clear()
        request.scope["session"].get("mapping", {})["more"] = 1
        request.scope["session"]["count"] = 99

    app = make_app(SessionCookieMiddleware, spoil)
    for _ in range(3):
        assert json.loads((await ask(app, [signed_cookie(session)]))[1]) == session


async def test_what_a_reply_sets_is_read_from_the_next_request_as_json_gives_it_back() -> None:
    keys: dict[Any, Any] = {1: "one", None: "none", "pair": (1, 2)}
    app = make_app(SessionCookieMiddleware, lambda request: request.session.update(keys))
    headers, _ = await ask(app, [])
    cookie = dict(headers)[b"set-cookie"].partition(b";")[0].decode()
    assert json.loads((await ask(app, [cookie]))[1]) == {"1": "one", "null": "none", "pair": [1, 2]}


async def test_the_age_of_a_remembered_cookie_is_looked_at_each_time() -> None:
    cookies = SessionCookies(COOKIE, [SECRET])
    long, short = (make_app(SessionCookieMiddleware, look, max_age=age, cookies=cookies) for age in (100, 10))
    cookie = signed_cookie(FLAT, age=50)
    for app, seen in [(long, FLAT), (short, {}), (long, FLAT)]:
        assert json.loads((await ask(app, [cookie]))[1]) == seen


async def test_what_is_remembered_is_bounded_and_nothing_forged_or_long_is() -> None:
    cookies = SessionCookies(COOKIE, [SECRET])
    for bad in [signed_cookie(FLAT, secret="x"), f"{COOKIE}=x", f"{COOKIE}2=x", signed_cookie({"text": "x" * 9000})]:
        cookies.verify(bad.encode())
    cookies.sign({"text": "x" * 9000})
    assert cookies.remembered == 0
    signed = [cookies.sign({"number": number}) for number in range(5000)]
    assert 100 < cookies.remembered < 5000
    for number, value in enumerate(signed):
        cookie = cookies.verify(f"{COOKIE}={value}".encode())
        assert cookie is not None
        assert cookie.new_session() == {"number": number}


def test_cookies_shared_with_the_middleware_must_be_of_its_name_and_secret() -> None:
    for cookies in (SessionCookies("another", [SECRET]), SessionCookies(COOKIE, ["another", SECRET])):
        with pytest.raises(ValueError, match="the same session_cookie and secret_key"):
            SessionCookieMiddleware(make_app(SessionMiddleware, leave), SECRET, COOKIE, cookies=cookies)


async def test_a_cookie_that_starlette_would_choke_on_is_no_session() -> None:
    app = make_app(SessionCookieMiddleware, write)
    for payload in (base64.b64encode(b"{"), base64.b64encode(b"[" * 20_000), b"a", base64.b64encode(b"[1, 2]")):
        headers, body = await ask(app, [signed_cookie(payload)])
        assert body == b"{}"
        assert said(headers)[-1][1][0] == b'{"count": 4}'


@pytest.mark.parametrize("shares", [True, False])
async def test_a_router_that_shares_the_cookies_reads_those_of_an_earlier_secret_too(
    shares: bool, tmp_path: Any
) -> None:
    secrets = [SECRET, "an earlier one"]
    cookies = {"cookies": SessionCookies(COOKIE, secrets)} if shares else {}
    app = make_app(SessionCookieMiddleware, leave, **cookies)
    worker_id = install_session_routing(app, socket_dir=tmp_path, session_cookie=COOKIE, secret_key=secrets)
    for secret, has_session in [(SECRET, True), ("an earlier one", True), ("another", False)]:
        _, body = await ask(app, [owned_cookie(worker_id, secret=secret)])
        assert ("nemo_gym_worker" in json.loads(body)) is has_session


@pytest.mark.promise("secrets-rotate")
async def test_without_a_router_too_all_secrets_verify_and_the_first_signs() -> None:
    secrets = [SECRET, "an earlier one", "the first one"]
    options: dict[str, Any] = {"max_age": 100, "cookies": SessionCookies(COOKIE, secrets)}
    app = make_app(SessionCookieMiddleware, leave, **options)
    ages = {90: True, 110: False, -10: False}
    cases = [(secret, age, kept) for secret in secrets for age, kept in ages.items()]
    for secret, age, is_kept in [*cases, ("another", 0, False)]:
        old = signed_cookie({"count": 5}, secret=secret, age=age)
        assert (await ask(app, [old]))[1] == (b'{"count": 5}' if is_kept else b"{}"), (secret, age)
    old = signed_cookie({"count": 5}, secret="the first one")
    headers, _ = await ask(make_app(SessionCookieMiddleware, write, **options), [old])
    renewed = dict(headers)[b"set-cookie"].decode().partition(";")[0]
    assert (await ask(make_app(SessionMiddleware, leave), [renewed]))[1] == b'{"count": 4}'
    headers, _ = await ask(make_app(SessionCookieMiddleware, clear, **options), [old])
    assert b"=null;" in dict(headers)[b"set-cookie"]
    for payload in (base64.b64encode(b"{"), b"a", base64.b64encode(b"[1, 2]")):
        assert (await ask(app, [signed_cookie(payload, secret="the first one")]))[1] == b"{}"


def test_a_cookie_that_is_signed_again_takes_no_others_place() -> None:
    cookies = SessionCookies(COOKIE, [SECRET])
    with mock.patch("time.time", return_value=1_800_000_000):
        for number in range(5000):
            cookies.sign({"number": number})
        limit = cookies.remembered
        cookies.sign({"number": 4999})
    assert cookies.remembered == limit


async def test_a_session_that_is_no_json_is_an_error_as_with_starlette() -> None:
    for cls in (SessionMiddleware, SessionCookieMiddleware):
        with pytest.raises(TypeError, match="not JSON serializable"), contextlib.nullcontext():
            await ask(make_app(cls, lambda request: request.session.update(a=object())), [])
