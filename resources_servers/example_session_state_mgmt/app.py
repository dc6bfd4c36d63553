"""A counter per session: the smallest environment whose tools change state.

A session begins with `POST /seed_session` and its `initial_count`; the tools read and change that session's counter;
`POST /verify` rewards 1.0 if it stands at `expected_count`, else 0.0.

The counters live in this process, by session id. A request whose session has no counter is answered 410 and never
starts one: a fresh counter would give a wrong value that looks right. Verifying leaves the counter as it is, so that
it may be asked for again. Memory is bounded by `max_sessions`: beyond it the counter untouched for longest is dropped,
which in practice is one of a rollout long over.
"""

from collections import OrderedDict

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictInt

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint


class StatefulCounterResourcesServerConfig(BaseResourcesServerConfig):
    """The settings of the counter server.

    Attributes:
        max_sessions: How many counters one worker keeps.
    """

    max_sessions: int = Field(default=100_000, ge=1)


class StatefulCounterSeedSessionRequest(BaseSeedSessionRequest):
    """Where the session's counter starts."""

    initial_count: StrictInt


class IncrementCounterRequest(BaseModel):
    """The arguments of the tool `increment_counter`; a negative count takes away."""

    model_config = ConfigDict(extra="forbid")

    count: StrictInt


class IncrementCounterResponse(BaseModel):
    """The result of the tool `increment_counter`."""

    success: bool


class GetCounterValueRequest(BaseModel):
    """The tool `get_counter_value` takes no arguments."""

    model_config = ConfigDict(extra="forbid")


class GetCounterValueResponse(BaseModel):
    """The result of the tool `get_counter_value`."""

    count: int


class StatefulCounterVerifyRequest(BaseVerifyRequest):
    """A finished rollout; other fields of the row are handed through."""

    model_config = ConfigDict(extra="allow")

    expected_count: StrictInt


class StatefulCounterVerifyResponse(StatefulCounterVerifyRequest, BaseVerifyResponse):
    """The verdict, with the count that was found."""

    final_count: int


class StatefulCounterResourcesServer(SimpleResourcesServer):
    """Serves the counters."""

    config: StatefulCounterResourcesServerConfig

    _counters: OrderedDict[str, int] = PrivateAttr(default_factory=OrderedDict)

    def setup_webserver(self) -> FastAPI:
        """Return the application with the two tools."""
        app = super().setup_webserver()
        app.post("/increment_counter")(self.increment_counter)
        app.post("/get_counter_value")(self.get_counter_value)
        return app

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: StatefulCounterSeedSessionRequest
    ) -> BaseSeedSessionResponse:
        """Set the session's counter to `initial_count`; a second seed starts it over."""
        session_id = request.session[SESSION_ID_KEY]
        self._counters[session_id] = body.initial_count
        self._counters.move_to_end(session_id)
        while len(self._counters) > self.config.max_sessions:
            self._counters.popitem(last=False)
        return BaseSeedSessionResponse()

    async def increment_counter(self, request: Request, body: IncrementCounterRequest) -> IncrementCounterResponse:
        """Add an amount to the counter; a negative amount takes away."""
        self._counters[request.session[SESSION_ID_KEY]] = self._count_of(request) + body.count
        return IncrementCounterResponse(success=True)

    async def get_counter_value(self, request: Request, body: GetCounterValueRequest) -> GetCounterValueResponse:
        """Read the counter."""
        return GetCounterValueResponse(count=self._count_of(request))

    async def verify(  # type: ignore[override]
        self, request: Request, body: StatefulCounterVerifyRequest
    ) -> StatefulCounterVerifyResponse:
        """Reward 1.0 if the session's counter stands at `expected_count`, else 0.0."""
        count = self._count_of(request)
        reward = 1.0 if count == body.expected_count else 0.0
        return StatefulCounterVerifyResponse(**{**dict(body), "reward": reward, "final_count": count})

    def _count_of(self, request: Request) -> int:
        session_id = request.session[SESSION_ID_KEY]
        count = self._counters.get(session_id)
        if count is None:
            raise HTTPException(
                410, "this session has no counter: it was never seeded, or its state is gone; call /seed_session first"
            )
        self._counters.move_to_end(session_id)
        return count


if __name__ == "__main__":
    StatefulCounterResourcesServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = StatefulCounterResourcesServer.run_webserver()
