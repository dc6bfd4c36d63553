"""Defaults of the libraries below that would bite: each is switched off, and each is proven so here."""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.server import bootstrap
from nemo_gym.session_routing import SOCKET_DIR_ENV
from nemo_gym.session_routing.owner_pool import OwnerPool
from tests.session_workers import Worker, make_app, owned_cookie, running_workers

AT_ONCE = 150


@pytest.mark.promise("no-time-limit")
async def test_a_call_may_last_as_long_as_its_client_waits() -> None:
    pool = OwnerPool(Path("/no/such/socket"))
    try:
        timeout = pool.session.timeout
        limits = (timeout.total, timeout.connect, timeout.sock_connect, timeout.sock_read)
        assert limits == (None, None, None, None)
    finally:
        await pool.retire()


@pytest.mark.promise("no-connection-limit")
@pytest.mark.usefixtures("hop")
async def test_handlers_that_call_their_own_server_do_not_wait_for_each_other(socket_dir: Path) -> None:
    """The limit of 100 connections would let the outer calls take all, and the inner ones wait for ever."""
    doors: list[Worker] = []

    async def outer(request: Request) -> Response:
        inner = await doors[0].request("/count", method="POST", cookie=request.headers["cookie"])
        return Response(inner.body, inner.status)

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/outer", outer))) as (here, there):
        doors.append(here)
        cookie = owned_cookie(there.worker_id)
        replies = await asyncio.gather(*(here.request("/outer", cookie=cookie) for _ in range(AT_ONCE)))
        assert sorted(reply.json()["count"] for reply in replies) == list(range(1, AT_ONCE + 1))
        assert there.router.statistics().arrived == 2 * AT_ONCE


@pytest.mark.promise("cookies-not-stored")
@pytest.mark.usefixtures("hop")
async def test_cookies_of_one_reply_are_not_sent_with_the_next_request(socket_dir: Path) -> None:
    async def give(_: Request) -> Response:
        response = Response("ok")
        response.set_cookie("theirs", "of another client")
        return response

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/give", give))) as (here, there):
        cookie = owned_cookie(there.worker_id)
        assert (await here.request("/give", cookie=cookie)).all("set-cookie")
        seen = (await here.request("/seen", cookie=cookie)).json()
    assert seen["worker"] == there.worker_id
    assert [value for name, value in seen["headers"] if name == "cookie"] == [cookie]


@pytest.mark.promise("compressed-untouched")
@pytest.mark.usefixtures("hop")
async def test_compressed_bodies_stay_compressed_in_both_directions(socket_dir: Path) -> None:
    packed = gzip.compress(b"a body" * 10_000)

    async def reply_packed(request: Request) -> Response:
        assert await request.body() == packed
        return Response(packed, headers={"content-encoding": "gzip"})

    async def stream_packed(_: Request) -> Response:
        return StreamingResponse(iter([packed[:9], packed[9:]]), headers={"content-encoding": "gzip"})  # type: ignore[arg-type]

    routes = [Route("/packed", reply_packed, methods=["POST"]), Route("/stream", stream_packed, methods=["POST"])]
    async with running_workers(socket_dir, 2, lambda: make_app(*routes)) as (here, there):
        for path in ("/packed", "/stream"):
            headers = [("content-encoding", "gzip"), ("accept-encoding", "gzip")]
            cookie = owned_cookie(there.worker_id)
            reply = await here.request(path, method="POST", headers=headers, body=packed, cookie=cookie)
            assert (reply.status, reply.body, reply.all("content-encoding")) == (200, packed, ["gzip"])


@pytest.mark.promise("target-untouched")
@pytest.mark.parametrize(
    "target", ["/a%2fb", "/a%2Fb", "/%2e%2e/x", "/./a/../b", "/a//b", "/%7Euser", "/?q=%2f%2E&+", "/x?"]
)
async def test_the_target_is_not_made_tidy(pair: tuple[Worker, Worker], target: str) -> None:
    here, there = pair
    seen = (await here.request(target, cookie=owned_cookie(there.worker_id))).json()
    path, _, query = target.partition("?")
    assert (seen["raw_path"], seen["query"], seen["worker"]) == (path, query, there.worker_id)


@pytest.mark.promise("large-reply-headers")
@pytest.mark.parametrize(("number", "length"), [(1, 8_191), (1, 100_000), (101, 10), (400, 500)])
@pytest.mark.usefixtures("hop")
async def test_reply_headers_may_be_longer_and_more_than_a_client_takes(
    socket_dir: Path, number: int, length: int
) -> None:
    async def reply(_: Request) -> Response:
        return Response("ok", headers={f"x-{n}": "v" * length for n in range(number)})

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/", reply))) as (here, there):
        headers = dict((await here.request("/", cookie=owned_cookie(there.worker_id))).headers)
    assert [len(headers[f"x-{n}"]) for n in range(number)] == [length] * number


@pytest.mark.promise("callers-address")
async def test_what_a_trusted_proxy_says_of_the_client_holds_for_the_owners_handler(
    pair: tuple[Worker, Worker],
) -> None:
    there = pair[1]
    headers = [("x-forwarded-proto", "https"), ("x-forwarded-for", "192.0.2.7")]
    for worker in pair:
        seen = (await worker.request("/", headers=headers, cookie=owned_cookie(there.worker_id))).json()
        assert (seen["scheme"], seen["client"]) == ("https", ["192.0.2.7", 0])


@pytest.mark.promise("any-framing")
async def test_a_small_body_that_dribbles_in_passes_whole(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    async with await here.connect() as connection:
        headers = [("host", "h"), ("cookie", owned_cookie(there.worker_id)), ("content-length", "6")]
        connection.send_head("POST", "/", headers)
        for piece in (b"ab", b"cd", b"ef"):
            connection.writer.write(piece)
            await connection.writer.drain()
            await asyncio.sleep(0.01)
        assert base64.b64decode((await connection.reply()).json()["body"]) == b"abcdef"


@pytest.mark.promise("pieces-at-once")
def test_the_listening_socket_that_workers_inherit_sends_pieces_at_once() -> None:
    config = BaseRunServerInstanceConfig(
        name="server", host="127.0.0.1", port=0, entrypoint="app.py", num_workers=2, domain="other"
    )
    with bootstrap._bind(config) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.promise("directory-falls-back")
def test_a_read_only_tmp_and_a_very_long_tmpdir_do_not_stop_a_server(tmp_path: Path) -> None:
    """In a mount namespace of its own, where the kernel permits one."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    program = (
        "from nemo_gym.session_routing import create_socket_dir, remove_socket_dir\n"
        "path = create_socket_dir(); print(path); remove_socket_dir(path)"
    )
    environment = {**os.environ, "TMPDIR": str(long), "PROGRAM": program, "PYTHON": sys.executable}
    for name in (SOCKET_DIR_ENV, "XDG_RUNTIME_DIR"):
        environment.pop(name, None)
    script = (
        '(mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp) 2>/dev/null || exit 77; exec "$PYTHON" -c "$PROGRAM"'
    )
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip("no mount namespaces here")
    assert ended.stdout.startswith("/dev/shm/nemo-gym-"), ended.stderr
