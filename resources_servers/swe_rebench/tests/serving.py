"""What the tests that drive the server share: the example rows, and clients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

FOLDER = Path(__file__).parents[1]
LINES = (FOLDER / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = {row["instance_id"].split("__")[1].removesuffix("-1"): row for row in map(json.loads, LINES)}
RESPONSE = {"id": "resp_1", "created_at": 0, "model": "test", "object": "response", "output": []}

Build = Callable[..., Any]
"""Makes a running server of the settings that it is given."""


def sandboxes(root: Path) -> list[Path]:
    return list(root.glob("sb-*"))


def client_of(app: FastAPI) -> httpx2.AsyncClient:
    """A client with cookies of its own, which is one session."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://swe", timeout=120)


async def seeded(app: FastAPI, row: dict[str, Any]) -> httpx2.AsyncClient:
    client = client_of(app)
    reply = await client.post("/seed_session", json=row)
    assert reply.status_code == 200, reply.text
    assert reply.json()["handle"]["provider"] == "local"
    assert reply.json()["workdir"]
    return client


async def call(client: httpx2.AsyncClient, tool: str, **arguments: Any) -> Any:
    reply = await client.post(f"/{tool}", json=arguments)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def verify(client: httpx2.AsyncClient, row: dict[str, Any]) -> Any:
    reply = await client.post("/verify", json={**row, "response": RESPONSE})
    assert reply.status_code == 200, reply.text
    return reply.json()
