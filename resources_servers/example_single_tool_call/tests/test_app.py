"""Drives the weather server over HTTP, in this process."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient

from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.server_utils import ServerClient
from resources_servers.example_single_tool_call.app import SingleToolCallResourcesServer

DATA = Path(__file__).parents[1] / "data" / "example.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def client() -> TestClient:
    config = BaseResourcesServerConfig(host="", port=0, entrypoint="", name="weather")
    server = SingleToolCallResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    return TestClient(server.setup_webserver())


def call(arguments: Any, name: str = "get_weather") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function_call", "call_id": "call_1", "name": name, "arguments": text}


def verdict(client: TestClient, city: str, *output: dict[str, Any]) -> dict[str, Any]:
    response = {"id": "resp_1", "created_at": 0, "model": "test", "object": "response", "output": list(output)}
    body = {"responses_create_params": {"input": "?"}, "expected_city": city, "response": response, "id": "row"}
    reply = client.post("/verify", json=body)
    assert reply.status_code == 200, reply.text
    parsed: dict[str, Any] = reply.json()
    assert parsed["id"] == "row"
    return parsed


def test_the_same_city_always_has_the_same_weather(client: TestClient) -> None:
    first, second = (client.post("/get_weather", json={"city": "Oslo"}).json() for _ in range(2))
    assert first == second
    assert first["city"] == "Oslo"
    assert -10 <= first["temperature_celsius"] <= 34


def test_arguments_other_than_a_city_are_refused(client: TestClient) -> None:
    for arguments in ({}, {"city": ""}, {"city": 5}, {"city": "Oslo", "unit": "K"}):
        assert client.post("/get_weather", json=arguments).status_code == 422


@pytest.mark.parametrize("city", ["São Paulo", "sao paulo", "SÃO  PAULO", "São Paulo, Brazil"])
def test_a_call_for_the_expected_city_is_rewarded_however_it_is_spelled(client: TestClient, city: str) -> None:
    result = verdict(client, "São Paulo", call({"city": city}))
    assert (result["reward"], result["called_cities"]) == (1.0, [city])


@pytest.mark.parametrize(
    "output",
    [
        [],
        [call({"city": "Rome"})],
        [call({"city": "Paris"}), call({"city": "Rome"})],
        [call({"city": "Paris"}, name="get_time")],
        [call({"place": "Paris"})],
        [call('{"city": "Paris"')],
        [{"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Paris"}]}],
    ],
    ids=["no call", "another city", "cities at random", "another tool", "wrong argument", "broken JSON", "only words"],
)
def test_anything_else_is_not_rewarded(client: TestClient, output: list[dict[str, Any]]) -> None:
    assert verdict(client, "Paris", *output)["reward"] == 0.0


def test_a_broken_call_that_is_made_good_is_rewarded(client: TestClient) -> None:
    assert verdict(client, "Paris", call("{city: Paris}"), call({"city": "Paris"}))["reward"] == 1.0


def test_example_rows_ask_for_their_city(client: TestClient) -> None:
    assert len(ROWS) >= 10
    for row in ROWS:
        assert row["expected_city"].casefold() in row["responses_create_params"]["input"][0]["content"].casefold()
        assert verdict(client, row["expected_city"], call({"city": row["expected_city"]}))["reward"] == 1.0
