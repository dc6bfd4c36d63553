"""Drives the model server over HTTP, in front of a backend that answers from a list."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import MagicMock

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from responses_api_models.openai_model.app import OpenAIModel, OpenAIModelConfig

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "add", "arguments": "{}", "status": "completed"}
REPLY = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "the-model",
    "output": [CALL, {"type": "web_search_call", "id": "ws_1", "status": "completed"}],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "service_tier": "default",
}


class Backend(ThreadingHTTPServer):
    """Answers 200 with `reply` and keeps what it was asked."""

    def __init__(self, reply: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.requests: list[tuple[str, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Backend

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        content = json.dumps(self.server.reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend(REPLY) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(backend: Backend) -> Iterator[TestClient]:
    config = OpenAIModelConfig(
        host="",
        port=0,
        entrypoint="",
        name="policy_model",
        openai_base_url=f"http://127.0.0.1:{backend.server_address[1]}/v1",
        openai_api_key="key",
        openai_model="the-model",
        extra_body={"temperature": 0.5, "service_tier": "flex"},
    )
    server = OpenAIModel(config=config, server_client=MagicMock(spec=ServerClient))
    with TestClient(server.setup_webserver()) as test_client:
        yield test_client


def test_requests_pass_with_all_their_fields(client: TestClient, backend: Backend) -> None:
    request = {
        "input": [{"role": "user", "content": "Hi"}, CALL, {"type": "item_reference", "id": "x"}],
        "tools": [{"type": "web_search"}],
        "temperature": 1.0,
        "prompt_cache_key": "k",
    }
    assert client.post("/v1/responses", json=request).status_code == 200
    assert backend.requests == [("/v1/responses", request | {"service_tier": "flex", "model": "the-model"})]


def test_nulls_of_our_own_servers_are_not_sent_on(client: TestClient, backend: Backend) -> None:
    call = {**CALL, "id": None, "status": None}
    tool = {"type": "function", "name": "add", "parameters": {"properties": {"a": {"default": None}}}}
    client.post("/v1/responses", json={"input": [call], "instructions": None, "tools": [tool]})
    (_, sent), *_ = backend.requests
    assert sent["tools"] == [tool]
    assert sent["input"] == [{key: value for key, value in call.items() if value is not None}]
    assert "instructions" not in sent


def test_replies_come_back_with_items_and_fields_we_do_not_know(client: TestClient) -> None:
    reply = client.post("/v1/responses", json={"input": "Hi"}).json()
    assert {key: reply[key] for key in REPLY} == REPLY


def test_chat_completions_pass_too(client: TestClient, backend: Backend) -> None:
    backend.reply = {
        "id": "chat_1",
        "object": "chat.completion",
        "created": 1,
        "model": "the-model",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello"}}],
    }
    messages = [{"role": "user", "content": "Hi"}]
    reply = client.post("/v1/chat/completions", json={"messages": messages, "seed": 1}).json()
    assert reply["choices"][0]["message"]["content"] == "Hello"
    path, sent = backend.requests[0]
    assert path == "/v1/chat/completions"
    assert (sent["messages"], sent["seed"], sent["model"]) == (messages, 1, "the-model")


def test_a_malformed_request_is_refused_without_asking_the_backend(client: TestClient, backend: Backend) -> None:
    assert client.post("/v1/responses", json={"input": [{"role": "nobody", "content": "Hi"}]}).status_code == 422
    assert backend.requests == []


@pytest.mark.parametrize("setting", [{"max_retries": -1}, {"timeout_s": 0}, {"max_concurrency": 0}])
def test_settings_that_make_no_sense_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OpenAIModelConfig.model_validate(
            {
                "host": "",
                "port": 0,
                "entrypoint": "",
                "name": "x",
                "openai_base_url": "http://x",
                "openai_api_key": "k",
                "openai_model": "m",
                **setting,
            }
        )
