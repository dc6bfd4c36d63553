"""The routes of the dashboard: what they answer, what they refuse, and what the files may contain."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import httpx2
import pytest

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.dashboard import pages
from nemo_gym.dashboard.pages import CONTENT_TYPES, dashboard_routes
from nemo_gym.errors import ConfigError, ServerNotFoundError
from nemo_gym.global_config import GlobalConfig, load_global_config
from nemo_gym.server.client import fetch_global_config_dict
from nemo_gym.server.head import HeadServer, application, running_head_server

STATIC = Path(pages.__file__).parent / "static"
DOCUMENT = ('"1"', b'{"deployment": {}}')


def configured(*overrides: str) -> GlobalConfig:
    return load_global_config([], overrides)


def client(host: str = "127.0.0.1", *overrides: str, name: str = "127.0.0.1:11000") -> httpx2.AsyncClient:
    config = configured(*overrides)
    head = HeadServer(BaseServerConfig(host=host, port=11000), config)
    app = application(head, dashboard_routes(lambda: DOCUMENT))
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=f"http://{name}")


@pytest.mark.parametrize("path", ["/", "/dashboard"])
async def test_the_page_comes_with_a_policy_that_lets_nothing_else_in(path: str) -> None:
    async with client() as http:
        reply = await http.get(path)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "frame-ancestors 'none'" in policy


async def test_every_file_of_the_page_is_served() -> None:
    async with client() as http:
        for file in STATIC.iterdir():
            reply = await http.get(f"/dashboard/static/{file.name}")
            assert (reply.status_code, reply.content) == (200, file.read_bytes())
            assert reply.headers["content-type"] == CONTENT_TYPES[file.suffix]
            assert reply.headers["x-content-type-options"] == "nosniff"


async def test_nothing_but_the_files_of_the_page_is_served() -> None:
    async with client() as http:
        for name in ("none.js", "..%2F__init__.py", "..%2f..%2ferrors.py", "__pycache__", "", "../pages.py"):
            assert (await http.get(f"/dashboard/static/{name}")).status_code == 404


@pytest.mark.parametrize("path", ["/", "/dashboard", "/dashboard/data", "/dashboard/static/main.js"])
async def test_the_page_only_reads(path: str) -> None:
    async with client() as http:
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            assert (await http.request(method, path)).status_code == 405


async def test_who_has_the_newest_figures_gets_them_not_again() -> None:
    async with client() as http:
        first = await http.get("/dashboard/data")
        assert (first.headers["content-type"], first.content) == ("application/json", DOCUMENT[1])
        again = await http.get("/dashboard/data", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        other = await http.get("/dashboard/data", headers={"If-None-Match": '"0"'})
        assert other.status_code == 200


async def test_the_head_servers_own_routes_are_there_too() -> None:
    async with client() as http:
        assert (await http.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/", "/dashboard/data", "/global_config_dict_yaml"])
async def test_a_head_on_loopback_answers_under_no_name_of_the_network(path: str) -> None:
    async with client() as http:
        for name in ("evil.example", "evil.example:11000", "127.0.0.1.evil.example", "10.0.0.7:11000", "", "a b"):
            reply = await http.get(path, headers={"Host": name})
            assert reply.status_code == 403
            assert "`head_server.allowed_hosts`" in reply.text
            assert "http://127.0.0.1:11000" in reply.text


async def test_a_head_on_loopback_answers_under_loopback_names() -> None:
    async with client() as http:
        for name in ("127.0.0.1:11000", "localhost:11000", "LOCALHOST", "[::1]:11000", "127.0.0.2"):
            assert (await http.get("/dashboard/data", headers={"Host": name})).status_code == 200


async def test_a_head_on_the_network_answers_under_addresses_and_allowed_names() -> None:
    async with client("0.0.0.0", "+head_server.allowed_hosts=[node17.example]", name="10.0.0.7:11000") as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/", headers={"Host": "Node17.example:80"})).status_code == 200
        assert (await http.get("/", headers={"Host": "evil.example"})).status_code == 403


async def test_an_allowed_name_may_be_given_with_its_port_or_in_brackets() -> None:
    for allowed in ("'Node17.example:11000'", "'[2001:db8::7]:80'"):
        async with client("127.0.0.1", f"+head_server.allowed_hosts=[{allowed}]", name="localhost") as http:
            replies = [await http.get("/", headers={"Host": it}) for it in ("node17.example", "[2001:db8::7]:80")]
            assert sorted(reply.status_code for reply in replies) == [200, 403]


async def test_a_star_allows_any_name() -> None:
    async with client("127.0.0.1", "+head_server.allowed_hosts=['*']", name="any.example") as http:
        assert (await http.get("/")).status_code == 200


@pytest.mark.parametrize("value", ["node17", "3", "[3]", "['a b']"])
def test_what_are_no_names_is_told(value: str) -> None:
    with pytest.raises(ConfigError, match=r"head_server\.allowed_hosts"):
        client("127.0.0.1", f"+head_server.allowed_hosts={value}")


def test_the_page_has_no_inline_code_and_loads_nothing_from_elsewhere() -> None:
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(|@import", text), file
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>[^<]", page) == []
    assert not re.search(r"<style|style=|\son\w+=", page)


def test_no_module_of_the_page_makes_html_from_text() -> None:
    for file in STATIC.glob("*.js"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )


async def test_who_asks_for_the_configuration_under_another_name_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_head_server(configured()) as head:
        # As a name that stands for this machine, and that the head server does not know.
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", head.config.port))],
        )
        asked = BaseServerConfig(host="evil.example", port=head.config.port)
        with pytest.raises(ServerNotFoundError, match=r"403: Forbidden\nThis name may not be used .*allowed_hosts"):
            await asyncio.to_thread(fetch_global_config_dict, asked)
