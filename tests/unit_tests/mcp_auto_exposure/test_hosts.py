"""Who may address `/mcp`: no page that rebinds its name to this machine, but sandboxes by configuration."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
from pydantic import ValidationError

from tests.mcp_support import Running, in_process, make_app, make_server

OWN_NAME = socket.gethostname()
SETTINGS = {
    "host": "gym.internal",
    "mcp_allowed_hosts": ["host.docker.internal", "Proxy.Example:8443"],
    "mcp_allowed_origins": ["https://inspector.example/", "http://Tools.example:6274"],
}


@pytest.fixture(scope="module")
async def app() -> AsyncIterator[Running]:
    async with in_process(make_app(make_server(**SETTINGS))) as it:
        yield it


@pytest.fixture(scope="module")
async def open_app() -> AsyncIterator[Running]:
    settings = {"mcp_allowed_hosts": ["*"], "mcp_allowed_origins": []}
    async with in_process(make_app(make_server(**settings))) as it:
        yield it


async def status(app: Running, method: str = "POST", **headers: str) -> int:
    """Return what a request that lists the tools is answered."""
    rpc = await app.rpc(token=None)
    sent = {**rpc.headers("tools/list"), "host": "localhost", **headers}
    reply = await app.http.request(method, rpc.url, json=rpc.message("tools/list", id=1), headers=sent)
    assert "set-cookie" not in reply.headers
    return reply.status_code


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:11000", "10.1.2.3:80", "169.254.1.1", "[::1]", "[::1]:8080", "[2001:db8::1]:80",
        "localhost", "localhost:8080", "LOCALHOST", "gym.internal", "GYM.internal:11000", OWN_NAME, f"{OWN_NAME}:80",
        "host.docker.internal", "host.docker.internal:11000", "HOST.docker.INTERNAL", "proxy.example:8443",
    ],
)  # fmt: skip
async def test_addresses_and_known_names_are_allowed(host: str, app: Running) -> None:
    assert await status(app, host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:80", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example",
        "127.0.0.1.nip.io", "0x7f000001", "2130706433", "127.1", "[evil.example]", "[::1].evil.example",
        "proxy.example", "proxy.example:80", "sub.gym.internal", "gym.internal.", "::1", ":80", "user@localhost",
        "localhost:80@evil.example", "localhost/evil", "[::1", "a" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE", "OPTIONS"])
async def test_any_other_name_may_have_been_rebound(
    host: str, method: str, app: Running, caplog: pytest.LogCaptureFixture
) -> None:
    assert await status(app, method, host=host) == 421
    (record,) = [it for it in caplog.records if "refused a request at /mcp for the host" in it.message]
    assert len(record.message) < 200


async def test_a_request_without_host_is_refused(app: Running) -> None:
    assert await status(app, host="") == 421


async def test_the_refusal_names_the_setting(app: Running) -> None:
    reply = await app.http.post("http://localhost/mcp", headers={"host": "evil.example"})
    assert "mcp_allowed_hosts" in reply.text
    reply = await app.http.post("http://localhost/mcp", headers={"origin": "https://evil.example"})
    assert "mcp_allowed_origins" in reply.text


async def test_other_paths_are_not_concerned(app: Running) -> None:
    reply = await app.http.post("http://localhost/seed_session", json={}, headers={"host": "evil.example"})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:6274", "localhost:11000"),
        ("https://localhost", "10.0.0.1"),
        ("http://127.0.0.1:3000", "localhost"),
        ("http://127.8.8.8", "localhost"),
        ("http://[::1]:3000", "localhost"),
        ("http://gym.internal:11000", "gym.internal:11000"),
        ("https://host.docker.internal", "host.docker.internal"),
        ("http://10.1.2.3:80", "10.1.2.3:80"),
        ("https://inspector.example", "localhost"),
        ("HTTPS://Inspector.Example", "localhost"),
        ("http://tools.example:6274", "localhost"),
    ],
)
async def test_pages_of_this_machine_of_this_server_and_named_ones_may_call(
    origin: str, host: str, app: Running
) -> None:
    assert await status(app, origin=origin, host=host) == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://evil.example", "localhost"),
        ("http://10.9.9.9", "localhost"),
        ("http://localhost.evil.example", "localhost"),
        ("http://evil.example#localhost", "localhost"),
        ("http://localhost@evil.example", "localhost"),
        ("http://gym.internal:81", "gym.internal:80"),
        ("http://inspector.example", "localhost"),
        ("https://inspector.example:444", "localhost"),
        ("https://sub.inspector.example", "localhost"),
        ("null", "localhost"),
        ("", "localhost"),
        ("file://localhost", "localhost"),
        ("http://[::1", "localhost"),
        ("localhost", "localhost"),
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
async def test_other_pages_may_not(origin: str, host: str, method: str, app: Running) -> None:
    assert await status(app, method, origin=origin, host=host) == 403


async def test_a_star_lets_every_name_in_but_no_page_that_rebinds_its_own(open_app: Running) -> None:
    assert await status(open_app, host="anything.example:1") == 200
    assert await status(open_app, host="") == 421
    assert await status(open_app, host="evil.example", origin="http://evil.example") == 403
    assert await status(open_app, host="127.0.0.1:5", origin="http://127.0.0.1:5") == 200


async def test_a_star_lets_every_page_in() -> None:
    async with in_process(make_app(make_server(mcp_allowed_origins=["*"]))) as app:
        assert await status(app, origin="https://any.example") == 200
        assert await status(app, origin="https://any.example", host="any.example") == 421


async def test_a_server_on_all_addresses_knows_its_machines_name() -> None:
    async with in_process(make_app(make_server(host="0.0.0.0"))) as app:
        assert await status(app, host=f"{OWN_NAME}:11000") == 200
        assert await status(app, host="evil.example") == 421


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mcp_allowed_hosts", "http://host.docker.internal"),
        ("mcp_allowed_hosts", ""),
        ("mcp_allowed_hosts", "a b"),
        ("mcp_allowed_hosts", "name/path"),
        ("mcp_allowed_origins", "inspector.example"),
        ("mcp_allowed_origins", "https://inspector.example/path"),
        ("mcp_allowed_origins", "https://"),
    ],
)
def test_an_entry_that_could_never_match_is_refused(key: str, value: str) -> None:
    with pytest.raises(ValidationError, match=f"{value!r} is no (host|origin); expected"):
        make_server(**{key: [value]})
