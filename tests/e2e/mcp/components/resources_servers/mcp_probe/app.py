"""An environment whose tools show which process ran them, and how their calls ended."""

import asyncio
import os
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, PrivateAttr

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint


class AddRequest(BaseModel):
    """What to add."""

    amount: int


class WaitRequest(BaseModel):
    """How long to wait; the label tells one call from another."""

    label: str
    seconds: float


class MCPProbe(SimpleResourcesServer):
    """Keeps a number per session, and a diary of its waiting."""

    _numbers: dict[str, int] = PrivateAttr(default_factory=dict)
    _diaries: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        """Return the application: two tools, and what the tests ask over plain HTTP."""
        app = super().setup_webserver()
        app.post("/add")(self.add)
        app.post("/wait")(self.wait)
        app.get("/diary")(self.diary)
        app.get("/worker")(self.worker)
        return app

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """Give full marks; nobody asks."""
        return BaseVerifyResponse(**dict(body), reward=1.0)

    async def add(self, request: Request, body: AddRequest) -> dict[str, int]:
        """Add to the session's number, and tell it and the process."""
        session_id = request.session[SESSION_ID_KEY]
        number = self._numbers.get(session_id, 0)
        self._numbers[session_id] = number + body.amount
        return {"number": number + body.amount, "pid": os.getpid()}

    async def wait(self, request: Request, body: WaitRequest) -> dict[str, str]:
        """Wait, and write down how that began and ended."""
        diary = self._diaries.setdefault(request.session[SESSION_ID_KEY], [])
        diary.append(f"{body.label} began")
        try:
            await asyncio.sleep(body.seconds)
        except asyncio.CancelledError:
            diary.append(f"{body.label} was cancelled")
            raise
        diary.append(f"{body.label} ended")
        return {"waited": body.label}

    async def diary(self, request: Request) -> list[str]:
        """Read what the session's waits have written."""
        return self._diaries.get(request.session[SESSION_ID_KEY], [])

    async def worker(self, request: Request) -> dict[str, Any]:
        """Tell which process answers, what its router has done and how many tasks it has; without a session."""
        tasks = len(asyncio.all_tasks())
        return {"pid": os.getpid(), "tasks": tasks, **asdict(request.app.state.session_routing.statistics())}


if __name__ == "__main__":
    MCPProbe.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = MCPProbe.run_webserver()
