"""What counts as a genuine owner: bad cookies, times, several secrets."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.routing import Route

from nemo_gym.session_routing import (
    SESSION_LOST_HEADER,
    SESSION_OWNER_KEY,
    create_socket_dir,
    remove_socket_dir,
)
from tests.session_workers import (
    COOKIE,
    SECRET,
    Worker,
    count,
    owned_cookie,
    running_worker,
    running_workers,
    signed_cookie,
)

GONE = "a" * 32
FORTNIGHT = 14 * 24 * 60 * 60


@pytest.fixture(scope="module")
def socket_dir() -> Iterator[Path]:
    path = create_socket_dir()
    yield path
    remove_socket_dir(path)


@pytest.fixture(scope="module")
async def pair(socket_dir: Path) -> AsyncIterator[tuple[Worker, Worker]]:
    async with running_workers(socket_dir, limit=120) as (first, second):
        yield first, second


@pytest.fixture
def worker(pair: tuple[Worker, Worker]) -> Worker:
    return pair[0]


def tampered(cookie: str) -> str:
    return cookie[:-3] + ("AAA" if not cookie.endswith("AAA") else "BBB")


GENUINE = owned_cookie(GONE)
NO_OWNER = {
    "forged": owned_cookie(GONE, secret="another secret"),
    "tampered": tampered(GENUINE),
    "truncated": GENUINE[: len(GENUINE) // 2],
    "unsigned": f"{COOKIE}={base64.b64encode(json.dumps({SESSION_OWNER_KEY: GONE}).encode()).decode()}",
    "empty": f"{COOKIE}=",
    "null": f"{COOKIE}=null",
    "no value": COOKIE,
    "dots": f"{COOKIE}=...",
    "garbage": f'{COOKIE}="\\377\\"; ;;=;{COOKIE}',
    "not ascii": f"{COOKIE}=\xe9\xff\x80",
    "huge": f"{COOKIE}={'x' * 50_000}",
    "another cookie": GENUINE.replace(COOKIE, COOKIE + "2"),
    "a bad one after a genuine one": f"{GENUINE}; {COOKIE}=bad",
    "no session in it": signed_cookie({}),
    "a list": signed_cookie([1, 2]),
    "a list of pairs": signed_cookie([[SESSION_OWNER_KEY, GONE]]),
    "a number": signed_cookie(7),
    "a string": signed_cookie(GONE),
    "nothing": signed_cookie(None),
    "not JSON": signed_cookie(base64.b64encode(b"{")),
    "not UTF-8": signed_cookie(base64.b64encode(b"\xff\xfe\xfa")),
    "not base64": signed_cookie(b"a"),
    "nested too deeply": signed_cookie(base64.b64encode(b"[" * 20_000)),
    **{
        f"owner {name}": signed_cookie({SESSION_OWNER_KEY: value})
        for name, value in {
            "path": "../../../../etc/passwd",
            "absolute path": "/etc/passwd",
            "url": "http://example.org/",
            "short": "a" * 31,
            "long": "a" * 33,
            "huge": "a" * 2_000,
            "upper case": "A" * 32,
            "new line": "a" * 32 + "\n",
            "wide digits": "\uff11" * 32,
            "number": 12,
            "list": [GONE],
            "mapping": {"id": GONE},
            "null": None,
        }.items()
    },
}


@pytest.mark.promise("bad-input")
async def test_a_cookie_without_a_genuine_owner_is_served_here_and_is_never_an_error(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    before = worker.router.statistics().forwarded
    for name, cookie in NO_OWNER.items():
        reply = await worker.request("/count", method="POST", cookie=cookie)
        assert (reply.status, reply.json()["worker"]) == (200, worker.worker_id), name
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert worker.router.statistics().forwarded == before


GENUINE_FORMS = {
    "plain": GENUINE,
    "quoted": f'{COOKIE}="{GENUINE.partition("=")[2]}"',
    "with spaces": f"  {COOKIE} = {GENUINE.partition('=')[2]} ",
    "among others": f"a=1; {GENUINE}; b=2",
    "after a bad one": f"{COOKIE}=bad; {GENUINE}",
    "after many": "; ".join(f"c{n}={'v' * 50}" for n in range(200)) + "; " + GENUINE,
}


@pytest.mark.promise("same-cookie-as-starlette")
async def test_a_genuine_owner_is_found_in_every_form_that_starlette_reads(worker: Worker) -> None:
    for name, cookie in GENUINE_FORMS.items():
        assert (await worker.request("/", cookie=cookie)).status == 410, name


@pytest.mark.promise("same-cookie-as-starlette")
async def test_of_several_cookie_headers_the_one_that_starlette_takes_decides(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    mine, other = owned_cookie(first.worker_id), owned_cookie(second.worker_id)
    for cookies, owner in [([mine, other], second), ([other, mine], first), ([other, "a=1"], second)]:
        reply = await first.request("/", headers=[("cookie", cookie) for cookie in cookies])
        assert reply.json()["worker"] == owner.worker_id, cookies


@pytest.mark.promise("expired-is-410", "typed-410")
async def test_a_genuine_cookie_out_of_its_time_is_an_expired_session(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    before = [dict(worker.app.state.counts) for worker in pair]
    for age in (FORTNIGHT + 60, FORTNIGHT, 10**8, -60, -(10**8)):
        for owner in (first.worker_id, second.worker_id, GONE):
            reply = await first.request("/count", method="POST", cookie=owned_cookie(owner, age=age))
            assert reply.status == 410
            assert reply.all(SESSION_LOST_HEADER) == ["session_expired"]
            assert reply.json()["reason"] == "session_expired"
            assert reply.json()["new_session_may_be_seeded"] is True
            assert "expired" in reply.json()["detail"]
    assert [worker.app.state.counts for worker in pair] == before


@pytest.mark.promise("expired-is-410")
async def test_a_cookie_that_is_nearly_too_old_is_still_good(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    cookie = owned_cookie(second.worker_id, age=FORTNIGHT - 30)
    assert (await first.request("/count", method="POST", cookie=cookie)).json()["worker"] == second.worker_id


async def test_an_expired_cookie_that_names_no_owner_starts_a_new_session(worker: Worker) -> None:
    cookie = signed_cookie({"id": "old"}, age=FORTNIGHT * 2)
    reply = await worker.request("/seed", method="POST", cookie=cookie)
    assert reply.status == 200
    assert reply.cookie != cookie


@pytest.mark.promise("secrets-rotate")
async def test_cookies_of_an_earlier_secret_keep_their_session_and_their_age(socket_dir: Path) -> None:
    def app() -> Starlette:
        app = Starlette(routes=[Route("/count", count, methods=["POST"])])
        app.state.counts = {}
        app.add_middleware(SessionMiddleware, secret_key="new", session_cookie=COOKIE)
        return app

    options: dict[str, Any] = {"secret_key": ["new", "older", SECRET]}
    async with running_workers(socket_dir, 2, app, **options) as (first, second):
        for worker in (first, second):
            for secret in ("new", "older", SECRET):
                cookie = f"x=1; {owned_cookie(first.worker_id, secret=secret, age=99)}; y=2"
                reply = await worker.request("/count", method="POST", cookie=cookie)
                assert reply.json()["worker"] == first.worker_id
        assert first.app.state.counts == {"a": 6}
        assert (await first.request("/count", method="POST", cookie=owned_cookie(GONE, secret="evil"))).status == 200
        old = owned_cookie(first.worker_id, secret=SECRET, age=FORTNIGHT)
        assert (await second.request("/count", method="POST", cookie=old)).status == 410


@pytest.mark.promise("request-unchanged")
async def test_the_other_cookies_of_a_request_stay_when_the_session_cookie_is_replaced(worker: Worker) -> None:
    bad = f"x=1; {signed_cookie([1])}; y=2"
    reply = await worker.request("/", headers=[("cookie", bad), ("cookie", "z=3"), ("cookie", signed_cookie(3))])
    assert [value for name, value in reply.json()["headers"] if name == "cookie"] == ["x=1; y=2", "z=3"]


async def test_cookies_that_never_expire_are_told_by_no_max_age(socket_dir: Path) -> None:
    app = Starlette(routes=[Route("/count", count, methods=["POST"])])
    app.state.counts = {}
    app.add_middleware(SessionMiddleware, secret_key=SECRET, session_cookie=COOKIE, max_age=None)
    async with running_worker(app, socket_dir, max_age=None) as worker:
        for age in (10**8, -60):
            cookie = owned_cookie(worker.worker_id, age=age)
            assert (await worker.request("/count", method="POST", cookie=cookie)).status == 200
        assert app.state.counts == {"a": 2}
