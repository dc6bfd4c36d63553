"""A model backend for tests: OpenAI-compatible, in a process of its own, and misbehaving on command.

Start it with `running_fake_backend()`, or by hand: `python tests/fake_backend.py`. It writes `{"port": ...}` as its
first line once it listens on a free port, and ends when its standard input does, so it never outlives a test.

`POST /v1/responses` and `POST /v1/chat/completions` are answered by the next behaviour of the script, then by "ok".
A model named `fake:<behaviour>` always has that behaviour. Behaviours:

- `ok`: the counter policy: increase by 1, increase by 2, read, then say the value; without these tools, a greeting
- `<status>` or `<status>:<Retry-After>`: an error reply, such as `429:0.01`
- `slow:<seconds>`: the good reply, late
- `invalid_json`, `json_array`, `empty_choices`, `wrong_shape`: a 200 that is no good
- `close`: closes the connection without an answer; `close_mid_body`: in the middle of one
- `redirect`: to another host
- `leak_key`: an error that repeats the Authorization header
- an object: that object, as a 200

`hold(after=n)` makes all requests beyond the next `n` wait for `release()`, so that a test can do something at a
moment that it knows.
"""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

Behaviour = str | dict[str, Any]

# The counter policy: each of these once, in this order.
PLAN: tuple[tuple[str, dict[str, int]], ...] = (
    ("increment_counter", {"count": 1}),
    ("increment_counter", {"count": 2}),
    ("get_counter_value", {}),
)


# Inside the process


class Backend:
    """The state of the fake: what to do next, and what it was asked."""

    def __init__(self) -> None:
        self.script: list[Behaviour] = []
        self.calls: list[dict[str, Any]] = []
        self.in_flight = 0
        self.held = 0
        self.passing: int | None = None
        self.released = asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/responses", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_post("/admin/script", self.set_script)
        app.router.add_get("/admin/calls", self.get_calls)
        app.router.add_post("/admin/reset", self.reset)
        app.router.add_post("/admin/hold", self.set_hold)
        app.router.add_get("/admin/held", self.get_held)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.in_flight += 1
        call = {"path": request.path, "headers": dict(request.headers), "body": body, "in_flight": self.in_flight}
        self.calls.append(call)
        try:
            await self.pass_gate()
            return await self.answer_by_script(request, body)
        finally:
            self.in_flight -= 1

    async def pass_gate(self) -> None:
        if self.passing is None:
            return
        self.passing -= 1
        if self.passing < 0:
            self.held += 1
            try:
                await self.released.wait()
            finally:
                self.held -= 1

    async def answer_by_script(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        model = str(body.get("model"))
        if model.startswith("fake:"):
            behaviour: Behaviour = model.removeprefix("fake:")
        else:
            behaviour = self.script.pop(0) if self.script else "ok"
        if isinstance(behaviour, dict):
            return web.json_response(behaviour)
        return await self.behave(request, body, behaviour)

    async def behave(self, request: web.Request, body: dict[str, Any], behaviour: str) -> web.StreamResponse:
        name, _, value = behaviour.partition(":")
        good = good_reply(request.path, body)
        if name.isdigit():
            error = {"error": {"message": f"the fake says {name}", "type": "fake_error", "code": None}}
            return web.json_response(error, status=int(name), headers={"Retry-After": value} if value else None)
        if name == "slow":
            await asyncio.sleep(float(value))
        elif name == "close":
            assert request.transport is not None
            request.transport.close()
        elif name == "close_mid_body":
            return await self.close_mid_body(request, json.dumps(good).encode())
        elif name == "redirect":
            raise web.HTTPTemporaryRedirect("http://user:secret@elsewhere.invalid/v1/responses?key=secret")
        elif name == "leak_key":
            return web.json_response({"error": {"message": request.headers["Authorization"]}}, status=401)
        elif name != "ok":
            return web.Response(body=bad_body(name, good), content_type="application/json")
        return web.json_response(good)

    async def close_mid_body(self, request: web.Request, content: bytes) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Length": str(len(content)), "Content-Type": "application/json"})
        await reply.prepare(request)
        await reply.write(content[: len(content) // 2])
        assert request.transport is not None
        request.transport.close()
        return reply

    async def set_script(self, request: web.Request) -> web.Response:
        self.script = await request.json()
        return web.json_response({})

    async def get_calls(self, request: web.Request) -> web.Response:
        return web.json_response(self.calls)

    async def reset(self, request: web.Request) -> web.Response:
        self.script, self.calls = [], []
        return web.json_response({})

    async def set_hold(self, request: web.Request) -> web.Response:
        self.passing = await request.json()
        self.released.set()
        self.released = asyncio.Event()
        return web.json_response({})

    async def get_held(self, request: web.Request) -> web.Response:
        return web.json_response(self.held)


def bad_body(name: str, good: Mapping[str, Any]) -> bytes:
    if name == "invalid_json":
        return b"<html>Bad gateway</html>"
    if name == "json_array":
        return b"[1, 2]"
    if name == "empty_choices":
        return json.dumps({**good, "choices": []}).encode()
    assert name == "wrong_shape", f"no such behaviour: {name}"
    return b'{"hello": "world"}'


def good_reply(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    offered = {tool.get("function", tool).get("name") for tool in body.get("tools") or []}
    if path.endswith("responses"):
        conversation = body["input"] if isinstance(body["input"], list) else []
        results = [item["output"] for item in conversation if item.get("type") == "function_call_output"]
        return response(body, *next_step(offered, results))
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    return chat_completion(body, *next_step(offered, results))


def next_step(offered: set[str], results: list[str]) -> tuple[str | None, tuple[str, dict[str, int]] | None]:
    """Return the words, or the call, with which the policy goes on after `results`."""
    if not {name for name, _ in PLAN} <= offered:
        return "Hello from the fake.", None
    if len(results) < len(PLAN):
        return None, PLAN[len(results)]
    return f"The counter says {results[-1]}.", None


def response(body: Mapping[str, Any], text: str | None, call: tuple[str, dict[str, int]] | None) -> dict[str, Any]:
    if call is not None:
        output: dict[str, Any] = {
            "type": "function_call",
            "id": "fc_1",
            "call_id": f"call_{len(json.dumps(body))}",
            "name": call[0],
            "arguments": json.dumps(call[1]),
            "status": "completed",
        }
    else:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        output = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": body["model"],
        "output": [output],
        "status": "completed",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 15,
        },
    }


def chat_completion(
    body: Mapping[str, Any], text: str | None, call: tuple[str, dict[str, int]] | None
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if call is not None:
        function = {"name": call[0], "arguments": json.dumps(call[1])}
        message["tool_calls"] = [{"id": f"call_{len(body['messages'])}", "type": "function", "function": function}]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop"}],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
    }


async def serve() -> None:
    # No access log: its lines would fill the pipe that only the first line is read from.
    runner = web.AppRunner(Backend().application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(json.dumps({"port": runner.addresses[0][1]}) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


# Outside


@dataclass(frozen=True)
class FakeBackend:
    """A running fake.

    Args:
        origin: Where it is, such as `http://127.0.0.1:1234`.
    """

    origin: str

    @property
    def base_url(self) -> str:
        """The base URL to configure a model server with."""
        return f"{self.origin}/v1"

    def script(self, *behaviours: Behaviour) -> None:
        """Set how the next requests are answered, one behaviour each; "ok" follows."""
        self._admin("script", list(behaviours))

    def calls(self) -> list[dict[str, Any]]:
        """Return the requests so far: `path`, `headers`, `body`, and how many were `in_flight` with it."""
        with urllib.request.urlopen(f"{self.origin}/admin/calls") as reply:
            calls: list[dict[str, Any]] = json.load(reply)
        return calls

    def reset(self) -> None:
        """Forget the calls and the script."""
        self._admin("reset", None)

    def hold(self, *, after: int) -> None:
        """Answer the next `after` requests, and keep those that follow waiting."""
        self._admin("hold", after)

    def held(self) -> int:
        """Return how many requests are waiting."""
        with urllib.request.urlopen(f"{self.origin}/admin/held") as reply:
            held: int = json.load(reply)
        return held

    def release(self) -> None:
        """Answer the requests that wait, and those to come."""
        self._admin("hold", None)

    def _admin(self, action: str, data: object) -> None:
        request = urllib.request.Request(f"{self.origin}/admin/{action}", json.dumps(data).encode(), method="POST")
        urllib.request.urlopen(request).close()


@contextmanager
def running_fake_backend() -> Iterator[FakeBackend]:
    """Run the fake as a process and yield it when it is ready."""
    command = [sys.executable, str(Path(__file__).resolve())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        port = json.loads(process.stdout.readline())["port"]
        try:
            yield FakeBackend(f"http://127.0.0.1:{port}")
        finally:
            process.stdin.close()
            process.wait(timeout=10)


if __name__ == "__main__":
    asyncio.run(serve())
