"""Drives the model server over HTTP, in front of a Chat Completions backend that answers the same to everything."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
REPLY = {
    "id": "chat_1",
    "object": "chat.completion",
    "created": 1,
    "model": "the-model",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CHAT_CALL]},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}


class Backend(ThreadingHTTPServer):
    """Answers 200 with `reply` and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: dict[str, Any] = REPLY
        self.requests: list[dict[str, Any]] = []

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Backend

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        content = json.dumps(self.server.reply).encode()
        self.send_response(200 if self.path == "/v1/chat/completions" else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def running_backend() -> Iterator[Backend]:
    with Backend() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def backend() -> Iterator[Backend]:
    with running_backend() as server:
        yield server


@contextmanager
def serving(base_url: str | list[str], **settings: Any) -> Iterator[TestClient]:
    common = {"host": "", "port": 0, "entrypoint": "", "name": "policy_model", "model": "the-model"}
    config = VLLMModelConfig.model_validate({**common, "base_url": base_url, **settings})
    server = VLLMModel(config=config, server_client=MagicMock(spec=ServerClient))
    with TestClient(server.setup_webserver()) as client:
        yield client


def test_a_request_is_converted_and_so_is_its_reply(backend: Backend) -> None:
    request = {"input": "Add.", "instructions": "Be brief.", "tools": [TOOL], "max_output_tokens": 9}
    with serving(backend.base_url) as client:
        reply = client.post("/v1/responses", json=request)
    assert backend.requests == [
        {
            "model": "the-model",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
            "max_tokens": 9,
        }
    ]
    response = reply.json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    assert response["output"][1]["arguments"] == '{"a": 1}'
    assert response["usage"]["total_tokens"] == 7
    assert response["tools"] == [TOOL]


def test_a_reply_can_be_sent_back_as_the_next_turns_input(backend: Backend) -> None:
    with serving(backend.base_url) as client:
        output = client.post("/v1/responses", json={"input": "Add."}).json()["output"]
        result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
        items = [{"role": "user", "content": "Add."}, *output, result]
        assert client.post("/v1/responses", json={"input": items}).status_code == 200
    assert backend.requests[1]["messages"] == [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "reasoning_content": "Hm.", "content": None, "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]


def test_think_tags_are_read_and_written_without_a_reasoning_parser(backend: Backend) -> None:
    message = {"role": "assistant", "content": "<think>Hm.</think>Two."}
    backend.reply = REPLY | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
    with serving(backend.base_url, uses_reasoning_parser=False) as client:
        output = client.post("/v1/responses", json={"input": "Add."}).json()["output"]
        assert [item["type"] for item in output] == ["reasoning", "message"]
        client.post("/v1/responses", json={"input": output})
    assert backend.requests[1]["messages"] == [message]


def test_configured_fields_are_added_and_do_not_replace_the_requests_own(backend: Backend) -> None:
    settings = {"extra_body": {"top_k": 5, "temperature": 0.1}, "chat_template_kwargs": {"a": 1, "b": 1}}
    request = {"input": "Hi", "temperature": 0.9, "chat_template_kwargs": {"b": 2}}
    with serving(backend.base_url, **settings) as client:
        client.post("/v1/responses", json=request)
    (sent,) = backend.requests
    assert (sent["top_k"], sent["temperature"], sent["chat_template_kwargs"]) == (5, 0.9, {"a": 1, "b": 2})


def test_chat_completions_pass_unconverted(backend: Backend) -> None:
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
    ]
    with serving(backend.base_url) as client:
        reply = client.post("/v1/chat/completions", json={"messages": messages, "min_p": 0.1})
    assert backend.requests == [{"messages": messages, "min_p": 0.1, "model": "the-model"}]
    assert reply.json()["choices"][0]["message"]["reasoning_content"] == "Hm."


def test_token_ids_that_are_needed_and_missing_are_a_bad_gateway(backend: Backend) -> None:
    with serving(backend.base_url, return_token_id_information=True) as client:
        reply = client.post("/v1/responses", json={"input": "Hi"})
    assert reply.status_code == 502
    assert "return_token_id_information" in reply.json()["detail"]
    assert backend.requests[0]["return_token_ids"] is True


def test_what_can_not_be_converted_is_refused_without_asking_the_backend(backend: Backend) -> None:
    with serving(backend.base_url) as client:
        reply = client.post("/v1/responses", json={"input": "Hi", "previous_response_id": "r"})
    assert reply.status_code == 400
    assert "previous_response_id" in reply.json()["detail"]
    assert backend.requests == []


def test_a_session_stays_with_its_replica_and_sessions_are_spread() -> None:
    with ExitStack() as stack:
        backends = [stack.enter_context(running_backend()) for _ in range(3)]
        client = stack.enter_context(serving([backend.base_url for backend in backends]))
        for _ in range(40):
            client.cookies.clear()
            before = [len(backend.requests) for backend in backends]
            for _ in range(3):
                client.post("/v1/responses", json={"input": "Hi"})
            grown = [len(backend.requests) - count for backend, count in zip(backends, before, strict=True)]
            assert sorted(grown) == [0, 0, 3]
        assert all(backend.requests for backend in backends)
