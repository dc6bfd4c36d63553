"""Calls between servers, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from http.cookies import SimpleCookie

import aiohttp
import pytest
from aiohttp import ClientTimeout
from fastapi import FastAPI, Request, Response
from omegaconf import OmegaConf
from pydantic import BaseModel

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.errors import ServerNotFoundError
from nemo_gym.global_config import GlobalConfig, find_open_port
from nemo_gym.server.client import ServerClient, close_client, get_response_json, raise_for_status, request
from nemo_gym.server.head import running_head_server
from tests.support import serving

pytestmark = pytest.mark.usefixtures("closed_client")


class Body(BaseModel):
    count: int = 3
    note: str | None = None


def echo_app() -> FastAPI:
    app = FastAPI()
    app.state.calls = 0

    @app.api_route("/echo", methods=["GET", "POST"])
    async def echo(request: Request, response: Response) -> dict[str, object]:
        app.state.calls += 1
        response.set_cookie("session", "from/server=+")
        return {
            "method": request.method,
            "cookies": request.cookies,
            "raw_cookie": request.headers.get("cookie"),
            "type": request.headers.get("content-type"),
            "header": request.headers.get("x-header"),
            "body": (await request.body()).decode(),
        }

    return app


def client_for(url: str) -> ServerClient:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    config = {"counter": {"resources_servers": {"x": {"entrypoint": "app.py", "host": host, "port": int(port)}}}}
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(config)
    )


async def test_servers_are_called_by_name_with_models_or_values_as_json() -> None:
    async with serving(echo_app()) as url:
        client = client_for(url)
        posted = await client.post(server_name="counter", url_path="/echo", json=Body(), headers={"x-header": "1"})
        nested = await client.post(server_name="counter", url_path="/echo", json={"inner": [Body(count=4)]})
        got = await client.get(server_name="counter", url_path="/echo")

        first = await get_response_json(posted)
        assert (first["method"], first["body"]) == ("POST", '{"count":3,"note":null}')
        assert (first["type"], first["header"]) == ("application/json", "1")
        assert (await get_response_json(nested))["body"] == '{"inner":[{"count":4,"note":null}]}'
        assert (await get_response_json(got))["method"] == "GET"


async def test_an_unknown_server_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ServerNotFoundError, match=r"no server 'countr'\. Did you mean 'counter'\?"):
        await client_for("http://127.0.0.1:1").get(server_name="countr", url_path="/")


async def test_cookies_are_carried_by_hand_and_never_kept() -> None:
    async with serving(echo_app()) as url:
        first = await request("POST", f"{url}/echo")
        assert first.cookies["session"].value == "from/server=+"
        assert (await get_response_json(await request("POST", f"{url}/echo")))["cookies"] == {}

        again = await get_response_json(await request("POST", f"{url}/echo", cookies=first.cookies))
        assert again["cookies"] == {"session": "from/server=+"}

        plain = await get_response_json(
            await request("POST", f"{url}/echo", cookies={"a": "1", "b": "x; y"}, headers={"cookie": "c=3"})
        )
        assert plain["cookies"] == {"a": "1", "b": "x; y", "c": "3"}


async def test_a_received_cookie_goes_back_byte_for_byte() -> None:
    value = "eyJhIjogMX0=.aBcD-_.x/y+z=="
    async with serving(echo_app()) as url:
        reply = await get_response_json(await request("GET", f"{url}/echo", cookies={"s": value}))
        assert reply["raw_cookie"] == f"s={value}"
        jar = SimpleCookie()
        jar.load(f"s={value}")
        reply = await get_response_json(await request("GET", f"{url}/echo", cookies=jar))
        assert reply["raw_cookie"] == f"s={value}"


async def test_an_error_keeps_the_body() -> None:
    async with serving(FastAPI()) as url:
        response = await request("GET", f"{url}/nowhere")
        with pytest.raises(aiohttp.ClientResponseError) as caught:
            await raise_for_status(response)
    assert caught.value.status == 404
    assert caught.value.response_content == b'{"detail":"Not Found"}'  # type: ignore[attr-defined]


async def test_a_refused_connection_is_tried_again_until_the_server_is_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    call = asyncio.create_task(request("POST", f"http://127.0.0.1:{port}/echo", json={}))
    await asyncio.sleep(0.1)
    assert not call.done()
    app = echo_app()
    async with serving(app, port=port):
        assert (await call).status == 200
    assert app.state.calls == 1


async def test_patience_ends() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(aiohttp.ClientConnectorError):
            await request("GET", url, connect_patience=0.2)


async def test_a_request_that_was_sent_is_never_sent_again() -> None:
    received = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        await reader.readuntil(b"\r\n\r\n")
        received += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        with pytest.raises(aiohttp.ClientError):
            await request("POST", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", json={})
    assert received == 1


async def test_three_hundred_slow_calls_are_in_flight_at_once() -> None:
    app = FastAPI()
    running = 0
    all_here = asyncio.Event()

    @app.get("/slow")
    async def slow() -> None:
        nonlocal running
        running += 1
        if running == 300:
            all_here.set()
        await all_here.wait()

    async with serving(app, backlog=1024) as url, asyncio.timeout(20):
        replies = await asyncio.gather(*(request("GET", f"{url}/slow") for _ in range(300)))
    assert {reply.status for reply in replies} == {200}


async def test_the_pool_opens_again_after_it_was_closed() -> None:
    async with serving(echo_app()) as url:
        assert (await request("GET", f"{url}/echo")).status == 200
        await close_client()
        assert (await request("GET", f"{url}/echo")).status == 200


async def test_a_client_for_running_servers_is_made_from_the_head_server_also_within_an_event_loop() -> None:
    port = find_open_port()
    config = GlobalConfig(OmegaConf.create({"head_server": {"host": "127.0.0.1", "port": port}, "a": 1}), {}, [])
    head = BaseServerConfig(host="127.0.0.1", port=port)
    async with running_head_server(config):
        client = await asyncio.to_thread(ServerClient.load_from_global_config, head)
        assert client.global_config_dict["a"] == 1
    with pytest.raises(ServerNotFoundError, match=rf"no head server answers at http://127\.0\.0\.1:{port}"):
        ServerClient.load_from_global_config(head)


async def test_extra_arguments_reach_the_http_client() -> None:
    async with serving(echo_app()) as url:
        reply = await request("GET", f"{url}/echo", params={"a": "1"}, json={"b": 2}, timeout=ClientTimeout(total=5))
        assert reply.url.query_string == "a=1"
        assert (await get_response_json(reply))["body"] == '{"b":2}'


async def test_a_body_of_many_megabytes_arrives_whole() -> None:
    async with serving(echo_app()) as url:
        reply = await get_response_json(await request("POST", f"{url}/echo", json={"text": "x" * 20_000_000}))
    assert len(reply["body"]) == 20_000_011
