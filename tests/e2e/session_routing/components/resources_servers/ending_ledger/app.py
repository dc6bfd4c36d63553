"""An environment that keeps a number per session and writes down how each session ends, in a file of all workers.

As careless as an environment may be: a session that it does not know has the number 0.
"""

import os
from pathlib import Path
from typing import ClassVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, PrivateAttr

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SessionEndReason,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint


class EndingLedgerConfig(BaseResourcesServerConfig):
    """Where the record of ends is."""

    record: str


class LedgerSeedRequest(BaseSeedSessionRequest):
    """The number to begin with, and perhaps an id of the caller's own."""

    number: int = 0
    resources_session_id: str | None = None


class LedgerSeedResponse(BaseSeedSessionResponse):
    """How to name the session from now on."""

    resources_session_id: str
    session_id: str
    pid: int


class AddRequest(BaseModel):
    """What to add."""

    amount: int
    resources_session_id: str | None = None


class EndingLedger(SimpleResourcesServer):
    """Keeps the numbers."""

    body_session_field: ClassVar[str | None] = "resources_session_id"

    config: EndingLedgerConfig

    _numbers: dict[str, int] = PrivateAttr(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        """Return the application with its tool."""
        app = super().setup_webserver()
        app.post("/add")(self.add)
        return app

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: LedgerSeedRequest
    ) -> LedgerSeedResponse:
        """Begin with the number."""
        session_id = request.session[SESSION_ID_KEY]
        self._numbers[session_id] = body.number
        made = self.new_body_session_id(request)
        return LedgerSeedResponse(resources_session_id=made, session_id=session_id, pid=os.getpid())

    async def add(self, request: Request, body: AddRequest) -> dict[str, int]:
        """Add to the session's number."""
        session_id = request.session[SESSION_ID_KEY]
        self._numbers[session_id] = self._numbers.get(session_id, 0) + body.amount
        return {"number": self._numbers[session_id], "pid": os.getpid()}

    async def verify(self, request: Request, body: BaseVerifyRequest) -> BaseVerifyResponse:  # type: ignore[override]
        """Reward with the number."""
        return BaseVerifyResponse(**dict(body), reward=self._numbers.get(request.session[SESSION_ID_KEY], 0))

    async def on_session_end(self, session_id: str, reason: SessionEndReason) -> None:
        """Write down the end; what is as short as a line is written whole."""
        self._numbers.pop(session_id, None)
        with Path(self.config.record).open("a") as record:  # noqa: ASYNC230
            record.write(f"{session_id} {reason} {os.getpid()}\n")


if __name__ == "__main__":
    EndingLedger.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = EndingLedger.run_webserver()
