"""Runs the relay and a stand-in for the other agent as real servers on ports of this machine."""

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from omegaconf import OmegaConf

from nemo_gym.server_utils import ServerClient
from responses_api_agents.legacy_agent.app import LegacyAgent, LegacyAgentConfig


class OtherAgent:
    """An ASGI application that notes what reaches it, and answers as told."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks = [b"{}"]
        self.breaks_off = False
        self.scope: dict[str, Any] = {}
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.scope, self.body = scope, b""
        while True:
            message = await receive()
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if not self.breaks_off:
            await send({"type": "http.response.body", "body": b""})

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.scope["headers"] if key == name]


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve `app` on a free port, from a thread of its own; requests wait in the listening socket until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture(scope="module")
def other_and_port() -> Iterator[tuple[OtherAgent, int]]:
    other = OtherAgent()
    with serving(other) as other_port:
        address = {"responses_api_agents": {"x": {"host": "127.0.0.1", "port": other_port}}}
        agent_server = {"type": "responses_api_agents", "name": "other"}
        config = LegacyAgentConfig(host="", port=0, entrypoint="", name="relay", agent_server=agent_server)
        relay = LegacyAgent(config=config, server_client=ServerClient.from_config(OmegaConf.create({"other": address})))
        with serving(relay.setup_webserver()) as port:
            yield other, port


@pytest.fixture
def other(other_and_port: tuple[OtherAgent, int]) -> OtherAgent:
    other_and_port[0].__init__()  # type: ignore[misc]
    return other_and_port[0]


@pytest.fixture
def relay(other_and_port: tuple[OtherAgent, int]) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", other_and_port[1], timeout=30)
    yield connection
    connection.close()


def post(
    relay: http.client.HTTPConnection, path: str = "/run", body: Any = b"{}", headers: dict[str, str] | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    relay.request("POST", path, body=body, headers={"Content-Type": "application/json", **(headers or {})})
    response = relay.getresponse()
    return response, response.read()


@pytest.mark.parametrize("path", ["/run", "/aggregate_metrics", "/v1/responses"])
@pytest.mark.parametrize("body", [b'{"a":  1 }', b"no JSON \xff\x00", b""], ids=["json", "bytes", "empty"])
def test_bodies_pass_as_the_bytes_they_are(
    other: OtherAgent, relay: http.client.HTTPConnection, path: str, body: bytes
) -> None:
    other.chunks = [b'{"b" :2}', b"\x00\xff"]
    response, content = post(relay, path, body)
    assert (other.scope["path"], other.body) == (path, body)
    assert (response.status, content) == (200, b'{"b" :2}\x00\xff')


def test_a_query_passes(other: OtherAgent, relay: http.client.HTTPConnection) -> None:
    post(relay, "/run?a=1&a=x%20y")
    assert other.scope["query_string"] == b"a=1&a=x%20y"


@pytest.mark.parametrize("status", [200, 201, 307, 404, 410, 422, 500, 503])
def test_any_status_passes(other: OtherAgent, relay: http.client.HTTPConnection, status: int) -> None:
    other.status = status
    other.headers = [(b"location", b"/elsewhere"), (b"x-nemo-gym-session-lost", b"worker_gone")]
    response, _ = post(relay)
    assert response.status == status
    assert response.headers["X-NeMo-Gym-Session-Lost"] == "worker_gone"


def test_repeated_headers_pass_one_by_one_and_no_cookie_is_added(
    other: OtherAgent, relay: http.client.HTTPConnection
) -> None:
    other.headers = [
        (b"set-cookie", b"a=1; Path=/"),
        (b"set-cookie", b"b=2; Path=/; HttpOnly"),
        (b"x-list", b"1"),
        (b"x-list", b"2"),
        (b"content-type", b"text/odd"),
    ]
    response, _ = post(relay)
    assert response.headers.get_all("set-cookie") == ["a=1; Path=/", "b=2; Path=/; HttpOnly"]
    assert response.headers.get_all("x-list") == ["1", "2"]
    assert response.headers.get_all("content-type") == ["text/odd"]
    assert len(response.headers.get_all("date") or []) == 1


def test_the_callers_headers_and_cookies_pass_and_nothing_is_added(
    other: OtherAgent, relay: http.client.HTTPConnection
) -> None:
    post(relay, headers={"Cookie": "SimpleAgent___x=abc; b=2", "X-Own": "1", "Accept-Encoding": "identity"})
    assert other.values(b"cookie") == [b"SimpleAgent___x=abc; b=2"]
    assert other.values(b"x-own") == [b"1"]
    assert other.values(b"content-type") == [b"application/json"]
    names = {name for name, _ in other.scope["headers"]}
    assert names == {b"host", b"cookie", b"x-own", b"content-type", b"content-length", b"accept-encoding"}


def test_headers_of_one_connection_stay_on_it(other: OtherAgent, relay: http.client.HTTPConnection) -> None:
    other.headers = [(b"connection", b"x-hop"), (b"x-hop", b"1"), (b"keep-alive", b"timeout=9"), (b"x-end", b"1")]
    response, _ = post(relay, headers={"Connection": "X-Mine", "X-Mine": "1", "TE": "trailers", "X-End": "1"})
    assert (response.headers["x-hop"], response.headers["keep-alive"], response.headers["x-end"]) == (None, None, "1")
    assert (other.values(b"x-mine"), other.values(b"te"), other.values(b"x-end")) == ([], [], [b"1"])


def test_a_compressed_reply_stays_compressed(other: OtherAgent, relay: http.client.HTTPConnection) -> None:
    packed = gzip.compress(b'{"reward": 1.0}')
    other.headers, other.chunks = [(b"content-encoding", b"gzip")], [packed]
    response, content = post(relay, headers={"Accept-Encoding": "gzip"})
    assert (response.headers["content-encoding"], content) == ("gzip", packed)


def test_large_bodies_pass_both_ways(other: OtherAgent, relay: http.client.HTTPConnection) -> None:
    upload, download = b"u" * 5_000_000, [b"d" * 1_000_000] * 5
    other.chunks = download
    _, content = post(relay, body=upload)
    assert other.body == upload
    assert content == b"".join(download)


def test_a_body_of_unknown_length_passes(other: OtherAgent, relay: http.client.HTTPConnection) -> None:
    post(relay, body=iter([b'{"a"', b":1}"]))
    assert other.body == b'{"a":1}'


def test_a_reply_that_breaks_off_is_not_taken_for_a_whole_one(
    other: OtherAgent, relay: http.client.HTTPConnection
) -> None:
    other.chunks, other.breaks_off = [b'{"half":'], True
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        post(relay)


def test_the_relay_answers_for_its_own_health(other: OtherAgent, relay: http.client.HTTPConnection) -> None:
    relay.request("GET", "/health")
    assert json.loads(relay.getresponse().read()) == {"status": "ok"}
    assert other.scope == {}
