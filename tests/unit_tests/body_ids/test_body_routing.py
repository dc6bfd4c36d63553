"""Sessions named in the body, on several workers in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_gym.server.body_ids import body_id_field
from nemo_gym.session_routing import SESSION_OWNER_KEY, BodyIdField
from tests.ending_server import VERIFY, Client, NamedLedger, make
from tests.session_workers import (
    TOKENS,
    Worker,
    leave_stale_socket,
    make_app,
    owned_cookie,
    running_worker,
    running_workers,
    signed_cookie,
    token_of,
)

FIELD = "resources_session_id"


def named(session: str, **body: Any) -> dict[str, Any]:
    return {FIELD: session, **body}


@asynccontextmanager
async def running_ledgers(
    socket_dir: Path, number: int = 2, session_end: dict[str, Any] | None = None
) -> AsyncIterator[list[tuple[Any, Worker, Client]]]:
    """Serve a ledger on several workers, each with a client that talks to it alone and keeps no cookies."""
    async with AsyncExitStack() as stack:
        workers = []
        for _ in range(number):
            server = make(NamedLedger, session_end)
            options = {
                "session_cookie": server.get_session_middleware_key(),
                "secret_key": server.session_keys(),
                **server.session_routing_options(),
            }
            app = server.setup_webserver()
            worker = await stack.enter_async_context(running_worker(app, socket_dir, **options))
            client = Client(f"http://127.0.0.1:{worker.port}", keeps_cookies=False)
            stack.push_async_callback(client.http.close)
            workers.append((server, worker, client))
        try:
            async with asyncio.timeout(20):
                yield workers
        finally:
            for _, _, client in workers:
                await client.http.close()
            await asyncio.gather(*(worker.stop() for _, worker, _ in workers))


@pytest.mark.promise("body-id")
async def test_an_id_reaches_the_worker_that_made_it_whichever_worker_accepts_it(socket_dir: Path) -> None:
    async with running_ledgers(socket_dir, 3, {"after_verify": True}) as workers:
        for server, _, client in workers:
            seeded = (await client.post("/seed_session"))[1]
            for number, (_, _, other) in enumerate(workers, 1):
                status, reply = await other.post("/add", named(seeded[FIELD]))
                assert (status, reply) == (200, {"number": number, "session_id": seeded["session_id"]})
            for _, _, other in workers:
                assert (await other.post("/seed_session", named(seeded[FIELD])))[0] == 409
            status, verdict = await workers[0][2].post("/verify", named(seeded[FIELD], **VERIFY))
            assert (status, verdict["reward"]) == (200, 3.0)
            for _, _, other in workers:
                assert (await other.post("/add", named(seeded[FIELD])))[1]["reason"] == "session_ended"
                assert await other.post("/close_session", named(seeded[FIELD])) == (200, {"closed": False})
            assert server.ended == [(seeded["session_id"], "verified")]


@pytest.mark.promise("body-id")
async def test_an_id_of_a_worker_that_is_gone_or_out_of_its_time_is_lost(socket_dir: Path) -> None:
    async with running_ledgers(socket_dir) as ((_, worker, client), (_, _, other)):
        made = (await client.post("/seed_session"))[1][FIELD]
        await client.http.close()
        await worker.stop()
        for path in ("/add", "/seed_session"):
            status, reply = await other.post(path, named(made))
            assert (status, reply["reason"]) == (410, "worker_gone")


@pytest.mark.promise("body-id-callers")
async def test_an_id_of_the_caller_stays_where_it_arrives_and_another_worker_says_so(socket_dir: Path) -> None:
    async with running_ledgers(socket_dir) as ((_, _, client), (there, _, other)):
        await client.seed(**named("mine"))
        assert (await client.post("/add", named("mine")))[1]["number"] == 1
        status, reply = await other.post("/add", named("mine"))
        assert (status, "Another worker has the session" in reply["detail"]) == (409, True)
        assert (await other.post("/add", named("nobody's")))[1]["reason"] == "session_ended"
        assert there.numbers == {}


@pytest.mark.promise("body-id-callers")
async def test_with_its_cookie_a_session_of_the_callers_id_is_routed(socket_dir: Path) -> None:
    async with running_ledgers(socket_dir) as ((_, _, client), (_, _, other)):
        async with client.http.post("/seed_session", json=named("mine")) as reply:
            cookies = {name: morsel.value for name, morsel in reply.cookies.items()}
        assert (await client.post("/add", named("mine"), cookies=cookies))[1]["number"] == 1
        assert (await other.post("/add", named("mine"), cookies=cookies))[1]["number"] == 2


@pytest.mark.promise("body-id-claimed")
@pytest.mark.parametrize("session_end", [None, {}])
async def test_of_all_workers_one_begins_the_session_of_a_callers_id(socket_dir: Path, session_end: Any) -> None:
    async with running_ledgers(socket_dir, 4, session_end) as workers:
        for number in range(10):
            seeds = [client.post("/seed_session", named(f"rollout {number}")) for _, _, client in workers * 2]
            assert sorted([status for status, _ in await asyncio.gather(*seeds)]) == [200] + [409] * 7
        assert sum(len(server.numbers) for server, _, _ in workers) == 10


@pytest.mark.promise("body-id-claimed")
async def test_a_claim_ends_with_its_session(socket_dir: Path) -> None:
    async with running_ledgers(socket_dir, 2, {"after_verify": True}) as ((_, _, client), (_, _, other)):
        await client.seed(**named("mine"))
        assert (await other.post("/seed_session", named("mine")))[0] == 409
        assert (await client.post("/close_session", named("mine")))[1] == {"closed": True}
        await other.seed(**named("mine"))
        assert (await client.post("/seed_session", named("mine")))[0] == 409
        assert (await other.post("/seed_session", named("failing", fails=True)))[0] == 503
        assert await other.post("/close_session", named("failing")) == (200, {"closed": False})
        await client.seed(**named("failing"))


@pytest.mark.promise("body-id-claimed")
async def test_a_claim_lasts_until_the_end_of_its_session_is_over(socket_dir: Path) -> None:
    async with running_ledgers(socket_dir, 2, {}) as ((server, _, client), (_, _, other)):
        hook = server.gate("hook")
        assert (await client.post("/seed_session", named("mine", fails=True)))[0] == 503
        await hook.reached.wait()
        assert (await other.post("/seed_session", named("mine")))[0] == 409
        hook.open.set()
        assert await client.post("/close_session", named("mine")) == (200, {"closed": False})
        await other.seed(**named("mine"))


@pytest.mark.promise("body-id-claimed")
async def test_the_claim_of_a_dead_worker_is_taken_over_by_one(socket_dir: Path) -> None:
    async with running_ledgers(socket_dir, 3) as ((_, worker, client), *others):
        await client.seed(**named("mine"))
        await client.http.close()
        await worker.stop()
        leave_stale_socket(socket_dir, worker.worker_id)
        assert (await others[0][2].post("/add", named("mine")))[1]["reason"] == "session_ended"
        seeds = [other.post("/seed_session", named("mine")) for _, _, other in others]
        assert sorted([status for status, _ in await asyncio.gather(*seeds)]) == [200, 409]


async def test_the_claims_are_private_and_go_when_the_sessions_do(socket_dir: Path) -> None:
    async with running_ledgers(socket_dir, 2, {}) as ((_, _, client), _):
        await client.seed(**named("../../mine"))
        (claim,) = [path for path in (socket_dir / "ids").iterdir() if path.name != "lock"]
        assert "mine" not in claim.name
        assert (socket_dir / "ids").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (socket_dir / "ids").iterdir()] == ["lock"]


# The router alone, before an application that knows nothing of it.


async def parts(request: Request) -> Response:
    """Answer with the body as it came, part by part."""
    seen = []
    while True:
        message = await request.receive()
        seen.append([message["body"].decode("latin-1"), message.get("more_body", False)])
        if not message.get("more_body", False):
            return JSONResponse({"parts": seen, "worker": request.app.state.worker_id})


def app_with_parts() -> Any:
    return make_app(Route("/parts", parts, methods=["POST"]))


BODY_IDS = body_id_field("id", ["a key"])
JSON = ("content-type", "application/json")


def id_of(worker_id: str) -> str:
    return str(BODY_IDS.serializer.dumps({"sid": "a", SESSION_OWNER_KEY: worker_id}))  # type: ignore[attr-defined]


async def worker_of(here: Worker, body: bytes, **kwargs: Any) -> str:
    options = {"headers": [JSON], "method": "POST", **kwargs}
    reply = await here.request("/seen", body=body, **options)
    assert reply.status == 200, reply.body
    worker: str = reply.json()["worker"]
    return worker


@pytest.mark.promise("body-id")
async def test_the_router_reads_the_field_of_posted_json_only(socket_dir: Path) -> None:
    async with running_workers(socket_dir, 2, body_ids=BODY_IDS) as (here, there):
        own, other = here.worker_id, there.worker_id
        body = b'{"a": [1, {"id": "x"}], "id": "%s"}' % id_of(other).encode()
        assert await worker_of(here, body) == other
        assert await worker_of(here, body, headers=[]) == other
        assert (
            await worker_of(here, body, headers=[("content-type", "application/problem+json; charset=utf-8")]) == other
        )
        assert await worker_of(here, body[:-1] + b', "x": NaN}') == other
        for unread in (body[:-1], b"[" + body + b"]", b'{"a": ' + body + b"}", b"", b"\xff", b'"id"'):
            assert await worker_of(here, unread) == own
        assert await worker_of(here, b'{"id": "' + b"0" * 32 + b'"}') == own
        assert await worker_of(here, id_body("not a worker")) == own
        assert await worker_of(here, b'{"id": {"deep": ' + b"[" * 100_000) == own
        assert await worker_of(here, body, headers=[("content-type", "text/plain")]) == own
        assert await worker_of(here, body, method="PUT") == own
        reply = await here.request("/aggregate_metrics", method="POST", headers=[JSON], body=body)
        assert reply.json()["worker"] == own


def id_body(worker_id: str) -> bytes:
    return b'{"id": "%s"}' % id_of(worker_id).encode()


@pytest.mark.promise("body-id")
async def test_a_genuine_cookie_or_token_goes_before_the_body(socket_dir: Path) -> None:
    async with running_workers(socket_dir, 3, body_ids=BODY_IDS, **TOKENS) as (here, there, elsewhere):
        body = id_body(there.worker_id)
        assert await worker_of(here, body, cookie=owned_cookie(elsewhere.worker_id)) == elsewhere.worker_id
        assert await worker_of(here, body, cookie=signed_cookie({"id": "a"})) == here.worker_id
        assert await worker_of(here, body, headers=[JSON, token_of(elsewhere.worker_id)]) == elsewhere.worker_id
        assert await worker_of(here, body, cookie=owned_cookie("0" * 32, secret="forged")) == there.worker_id
        assert await worker_of(here, body, headers=[JSON, token_of("0" * 32, secret="forged")]) == there.worker_id
        reply = await here.request("/mcp", method="POST", headers=[JSON], body=body)
        assert reply.json()["worker"] == here.worker_id


@pytest.mark.promise("body-id-untouched")
@pytest.mark.parametrize("is_forwarded", [False, True])
async def test_a_body_that_was_read_ahead_is_handed_on_whole(socket_dir: Path, is_forwarded: bool) -> None:
    async with running_workers(socket_dir, 2, app_with_parts, body_ids=BODY_IDS) as (here, there):
        owner = there if is_forwarded else here
        pieces = [b'{"id": "', id_of(owner.worker_id).encode(), b'", "more": "', b"x" * 200_000, b'"}']
        async with await here.connect() as connection:
            connection.send_head("POST", "/parts", [("host", "h"), JSON, ("transfer-encoding", "chunked")])
            for piece in pieces:
                connection.writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await connection.writer.drain()
                await asyncio.sleep(0.02)
            connection.writer.write(b"0\r\n\r\n")
            reply = (await connection.reply("POST")).json()
        assert reply["worker"] == owner.worker_id
        assert "".join(text for text, _ in reply["parts"]) == b"".join(pieces).decode()
        # On the way to another worker, what lies ready goes together.
        assert is_forwarded or len(reply["parts"]) > 2


@pytest.mark.promise("body-id-untouched")
async def test_what_is_not_looked_into_still_streams(socket_dir: Path) -> None:
    async def echo(request: Request) -> Response:
        first = await anext(aiter(request.stream()))
        return Response(first)

    def app() -> Any:
        return make_app(Route("/echo", echo, methods=["POST"]), Route("/aggregate_metrics", echo, methods=["POST"]))

    async with running_workers(socket_dir, 1, app, body_ids=BODY_IDS) as (here,):
        for path, headers in (("/echo", []), ("/aggregate_metrics", [JSON])):
            kind = headers or [("content-type", "application/octet-stream")]
            async with await here.connect() as connection:
                connection.send_head("POST", path, [("host", "h"), *kind, ("content-length", "1000000000")])
                connection.writer.write(b"{first}")
                assert (await connection.reply("POST")).body == b"{first}"


@pytest.mark.promise("body-id-untouched")
@pytest.mark.parametrize("framing", ["content-length", "chunked"])
async def test_a_body_too_large_to_look_into_is_refused_unless_a_cookie_names_the_session(
    socket_dir: Path, framing: str
) -> None:
    small = BodyIdField("id", BODY_IDS.serializer, limit=100_000)
    async with running_workers(socket_dir, 2, body_ids=small) as (here, there):
        body = b'{"x": "%s"}' % (b"x" * 200_000)
        headers = [("host", "h"), JSON, ("connection", "close")]
        if framing == "chunked":
            headers.append(("transfer-encoding", "chunked"))
            sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        else:
            headers.append(("content-length", str(len(body))))
            sent = body
        async with await here.connect() as connection:
            connection.send_head("POST", "/seen", headers)
            connection.writer.write(sent)
            reply = await connection.reply("POST")
        assert (reply.status, "Send the session's cookie" in reply.json()["detail"]) == (413, True)
        assert await worker_of(here, body, cookie=owned_cookie(there.worker_id)) == there.worker_id


async def test_a_client_that_leaves_while_its_body_is_read_is_no_trouble(
    socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_workers(socket_dir, 1, body_ids=BODY_IDS) as (here,):
        async with await here.connect() as connection:
            connection.send_head("POST", "/seen", [("host", "h"), JSON, ("content-length", "100")])
            connection.writer.write(b'{"id": ')
            await connection.writer.drain()
        assert await worker_of(here, b"{}") == here.worker_id
    assert caplog.text == ""
