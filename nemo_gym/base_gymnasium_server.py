"""The base of environments in the manner of Gymnasium: an object with `reset` and `step` per session.

`POST /seed_session` makes the session's environment and resets it with the row's `seed`; the tools `step` and
`observe` act on it and look at it; `POST /verify` scores the episode from what the environment itself has paid, never
from what the model says. The environment lives in this process, with the session's owner, until `release`: when the
session is seeded anew, when it ends, or when it is the one untouched for longest of more than `max_sessions`.

Any object with Gymnasium's methods will do; this module needs no package beside the framework.

What becomes of trouble:

- A session without an episode (never seeded, or its state is gone): 410, never a fresh episode.
- An action that the environment does not take: 422; nothing has happened.
- A step after the end: 409; nothing has happened.
- An environment that raises: 500, and so for every later request of the episode, `/verify` included: an episode that
  nobody can judge has no reward.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar, Protocol, SupportsFloat, TypeVar

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SessionEndReason,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Environment(Protocol):
    """What an environment does; `gymnasium.Env` is one.

    The meanings are those of Gymnasium's documentation (https://gymnasium.farama.org/api/env/).
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return the first observation, and further information."""

    def step(self, action: Any, /) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act; return the observation, the reward, whether it terminated, whether it was cut, and information."""

    def close(self) -> None:
        """Let go of what the environment holds."""


@dataclass
class Episode:
    """One session's environment, and what has happened in it.

    Attributes:
        environment: The environment, reset.
        observation: The last observation, as JSON.
        total_reward: The episode's return so far: the sum of the rewards of its steps, without discount.
        steps: How many steps were taken.
        terminated: The environment has come to an end of its own.
        truncated: The episode was cut, by a limit of steps for example.
        failure: What went wrong in the environment; its state is unknown from then on.
        lock: Held by whoever uses the environment, which is not made for two at once.
        closed: The environment is closed.
    """

    environment: Environment
    observation: JsonValue
    total_reward: float = 0.0
    steps: int = 0
    terminated: bool = False
    truncated: bool = False
    failure: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: bool = False

    @property
    def over(self) -> bool:
        """Whether no further step can be taken."""
        return self.terminated or self.truncated


class GymnasiumServerConfig(BaseResourcesServerConfig):
    """The settings of a server of environments.

    Attributes:
        max_sessions: How many environments one worker keeps.
    """

    max_sessions: int = Field(default=10_000, ge=1)


class GymnasiumSeedSessionRequest(BaseSeedSessionRequest):
    """How the episode begins; environments add the fields of their rows that they need.

    Attributes:
        seed: Where the environment's random numbers start: the same seed and actions make the same episode. Without
            one, every episode is another.
        options: Handed to `reset`.
    """

    seed: int | None = Field(default=None, ge=0)
    options: dict[str, Any] | None = None


class GymnasiumSeedSessionResponse(BaseSeedSessionResponse):
    """The first observation, and the environment's further information."""

    observation: JsonValue
    info: dict[str, JsonValue]


class StepRequest(BaseModel):
    """The action. An environment narrows its type, so that the tool's schema says what may be done."""

    model_config = ConfigDict(extra="forbid")

    action: JsonValue


class StepResponse(BaseModel):
    """What a step has led to."""

    observation: JsonValue
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, JsonValue]


class ObserveRequest(BaseModel):
    """The tool `observe` takes no arguments."""

    model_config = ConfigDict(extra="forbid")


class ObserveResponse(BaseModel):
    """How things stand."""

    observation: JsonValue
    steps: int
    terminated: bool
    truncated: bool


class GymnasiumVerifyRequest(BaseVerifyRequest):
    """A finished rollout; other fields of the row are handed through."""

    model_config = ConfigDict(extra="allow")


class GymnasiumVerifyResponse(GymnasiumVerifyRequest, BaseVerifyResponse):
    """The verdict.

    Attributes:
        episode_return: The sum of the rewards that the environment gave.
        steps: How many steps were taken.
        terminated: Whether the episode came to its own end.
        truncated: Whether it was cut.
    """

    episode_return: float
    steps: int
    terminated: bool
    truncated: bool


class GymnasiumServer(SimpleResourcesServer):
    """Serves one environment object per session: subclass it and implement `make_environment`.

    Attributes:
        in_threads: Whether the environment's methods run in a thread, as they block. False for environments whose
            steps take microseconds, and for those that must stay in one thread.
    """

    in_threads: ClassVar[bool] = True

    config: GymnasiumServerConfig

    _episodes: OrderedDict[str, Episode] = PrivateAttr(default_factory=OrderedDict)

    def setup_webserver(self) -> FastAPI:
        """Return the application with the tools `step` and `observe`."""
        app = super().setup_webserver()
        app.post("/step")(self.step)
        app.post("/observe")(self.observe)
        return app

    @abstractmethod
    def make_environment(self, body: Any) -> Environment:
        """Return a new environment for a session, not yet reset.

        Args:
            body: The body of `/seed_session`, as the type that the class's `seed_session` takes.
        """

    def to_action(self, episode: Episode, action: Any) -> Any:
        """Return what the environment's `step` takes for a tool's argument; the argument itself, unless overridden.

        An environment that has an `action_space`, as Gymnasium's have, is asked whether it contains the action.

        Raises:
            ValueError: The environment does not take this action; the text is for the model.
        """
        space = getattr(episode.environment, "action_space", None)
        if space is not None and not space.contains(action):
            raise ValueError(f"{action!r} is no action of {space}")
        return action

    def to_json(self, observation: Any) -> JsonValue:
        """Return an observation as the model sees it; plain data stays as it is, arrays become lists."""
        return plain(observation)

    def score(self, episode: Episode) -> float:
        """Return the reward for an episode, finished or not: its return, unless overridden."""
        return episode.total_reward

    def verdict(self, episode: Episode) -> dict[str, Any]:
        """Return what `/verify` answers beside the row; override it to tell more."""
        return {
            "reward": self.score(episode),
            "episode_return": episode.total_reward,
            "steps": episode.steps,
            "terminated": episode.terminated,
            "truncated": episode.truncated,
        }

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: GymnasiumSeedSessionRequest
    ) -> GymnasiumSeedSessionResponse:
        """Begin an episode; the one that the session had is over and its environment closed."""

        def begin() -> tuple[Episode, dict[str, JsonValue]]:
            environment = self.make_environment(body)
            try:
                observation, info = environment.reset(seed=body.seed, options=body.options)
                return Episode(environment, self.to_json(observation)), _plain_mapping(info)
            except BaseException:
                environment.close()
                raise

        episode, info = await self._run(begin)
        session_id = request.session[SESSION_ID_KEY]
        await self.release(session_id)
        self._episodes[session_id] = episode
        while len(self._episodes) > self.config.max_sessions:
            await self.release(next(iter(self._episodes)))
        return GymnasiumSeedSessionResponse(observation=episode.observation, info=info)

    async def step(self, request: Request, body: StepRequest) -> StepResponse:
        """Take one step; override it with a body whose `action` has the environment's own type."""
        episode = self._episode_of(request)
        async with episode.lock:
            self._check(episode)
            if episode.over:
                how = "terminated" if episode.terminated else "truncated"
                detail = f"the episode is over: {how} after {episode.steps} steps; this step was not taken"
                raise HTTPException(HTTPStatus.CONFLICT, detail)
            try:
                action = self.to_action(episode, body.action)
            except ValueError as error:
                raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
            return await self._take(episode, action)

    async def observe(self, request: Request, body: ObserveRequest) -> ObserveResponse:
        """Look at how things stand, without a step."""
        episode = self._episode_of(request)
        async with episode.lock:
            self._check(episode)
            return ObserveResponse.model_validate(episode, from_attributes=True)

    async def verify(  # type: ignore[override]
        self, request: Request, body: GymnasiumVerifyRequest
    ) -> GymnasiumVerifyResponse:
        """Score the session's episode, finished or not; it may go on, and be verified again."""
        episode = self._episode_of(request)
        async with episode.lock:
            self._check(episode)
            return GymnasiumVerifyResponse(**{**dict(body), **self.verdict(episode)})

    async def release(self, session_id: str) -> None:
        """Forget a session's episode and close its environment, once a step under way has ended; twice is fine."""
        episode = self._episodes.pop(session_id, None)
        if episode is None:
            return
        async with episode.lock:
            episode.closed = True
            try:
                await self._run(episode.environment.close)
            except Exception:
                logger.exception("%s: an environment failed to close", self.config.name)

    async def on_session_end(self, session_id: str, reason: SessionEndReason) -> None:
        """Close the environment of a session that has ended, where `session_end` is configured."""
        await self.release(session_id)

    async def _take(self, episode: Episode, action: Any) -> StepResponse:
        try:
            observation, reward, terminated, truncated, info = await self._run(lambda: episode.environment.step(action))
            paid = float(reward)
            if not math.isfinite(paid):
                raise ValueError(f"a reward of {paid}")
            seen = self.to_json(observation)
            told = _plain_mapping(info)
        except Exception as error:
            logger.exception("%s: an environment failed at a step", self.config.name)
            episode.failure = f"the environment failed at step {episode.steps + 1} ({type(error).__name__})"
            raise _failed(episode.failure) from error
        episode.observation = seen
        episode.total_reward += paid
        episode.steps += 1
        episode.terminated, episode.truncated = bool(terminated), bool(truncated)
        return StepResponse(
            observation=seen, reward=paid, terminated=episode.terminated, truncated=episode.truncated, info=told
        )

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.to_thread(work) if self.in_threads else work()

    def _episode_of(self, request: Request) -> Episode:
        session_id = request.session[SESSION_ID_KEY]
        episode = self._episodes.get(session_id)
        if episode is None:
            raise _no_episode()
        self._episodes.move_to_end(session_id)
        return episode

    def _check(self, episode: Episode) -> None:
        if episode.closed:
            raise _no_episode()
        if episode.failure is not None:
            raise _failed(episode.failure)


def plain(value: Any) -> JsonValue:
    """Return `value` as JSON has it: tuples and arrays become lists, numbers of numpy plain ones.

    Raises:
        TypeError: If a part of it is none of these.
    """
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    with suppress(AttributeError):  # arrays and numbers of numpy, and of the packages that are alike
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} is no JSON: override to_json to say how the model is to see it")


def _plain_mapping(info: Mapping[str, Any]) -> dict[str, JsonValue]:
    return {str(key): plain(part) for key, part in info.items()}


def _failed(failure: str) -> HTTPException:
    detail = f"{failure}; its state is unknown. Start a new session."
    return HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, detail)


def _no_episode() -> HTTPException:
    detail = "this session has no episode: it was never seeded, or its state is gone; call /seed_session first"
    return HTTPException(HTTPStatus.GONE, detail)
