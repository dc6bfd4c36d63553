"""The base of model servers that stand in front of an OpenAI-compatible backend.

A subclass says what to send; retries, time limits, the reply to a backend's failure and closing the
connections are the same for all, and here.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.errors import ConversionError, ModelBackendError
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI, NeMoGymChatCompletion

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=BaseModel)


class BackendModelConfig(BaseResponsesAPIModelConfig):
    """Settings of a model server with a backend.

    Args:
        max_retries: How often a call is repeated after 408, 429, 5xx or a failed connection.
        timeout_s: Seconds the backend may take for one attempt; None for no limit.
        connect_timeout_s: Seconds that opening a connection may take.
        max_concurrency: Calls under way at once, per backend and worker process; None for no limit.
        retry_delay_s: Seconds before the first repetition; doubled each time, less up to half at random.
        max_retry_delay_s: The longest wait between attempts, in seconds; a backend that asks for more by
            `Retry-After` is not asked again.
        use_env_proxy: Whether to go through the proxy that `HTTPS_PROXY` and its relatives name.
    """

    max_retries: int = Field(default=3, ge=0)
    timeout_s: float | None = Field(default=600.0, gt=0)
    connect_timeout_s: float = Field(default=10.0, gt=0)
    max_concurrency: int | None = Field(default=None, ge=1)
    retry_delay_s: float = Field(default=0.5, gt=0)
    max_retry_delay_s: float = Field(default=60.0, gt=0)
    use_env_proxy: bool = False


class BackendModel(SimpleResponsesAPIModel):
    """A model server with a backend: subclass it, call `client_for`, and check what comes back by `checked`."""

    config: BackendModelConfig

    _clients: list[NeMoGymAsyncOpenAI] = PrivateAttr(default_factory=list)

    def client_for(self, base_url: str, api_key: str) -> NeMoGymAsyncOpenAI:
        """Return a new client of a backend, with the configured limits; it is closed with the server."""
        config = self.config
        client = NeMoGymAsyncOpenAI(
            base_url=base_url,
            api_key=api_key,
            max_retries=config.max_retries,
            timeout_s=config.timeout_s,
            connect_timeout_s=config.connect_timeout_s,
            max_concurrency=config.max_concurrency,
            retry_delay_s=config.retry_delay_s,
            max_retry_delay_s=config.max_retry_delay_s,
            use_env_proxy=config.use_env_proxy,
        )
        self._clients.append(client)
        return client

    def setup_webserver(self) -> FastAPI:
        """Return the application; it tells the caller what the backend said, and closes the clients at the end."""
        app = super().setup_webserver()
        app.add_exception_handler(ModelBackendError, self._answer_backend_error)
        app.add_exception_handler(ConversionError, self._answer_conversion_error)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            try:
                async with inner(app) as state:
                    yield state
            finally:
                for client in self._clients:
                    await client.aclose()

        app.router.lifespan_context = lifespan
        return app

    def checked(self, reply_type: type[Reply], reply: dict[str, Any], url: str) -> Reply:
        """Return a backend's reply as a model.

        Args:
            reply_type: What the reply should be.
            reply: The JSON object that came.
            url: The backend's address, for the error.

        Raises:
            ModelBackendError: When it is something else.
        """
        try:
            return reply_type.model_validate(reply)
        except ValidationError as error:
            problems = "; ".join(f"{_path(problem['loc'])}: {problem['msg']}" for problem in error.errors()[:3])
            kind = reply_type.__name__.removeprefix("NeMoGym")
            raise ModelBackendError(
                f"answered 200 with JSON that is no {kind}: {problems}", url=url, status=200
            ) from error

    def checked_completion(self, reply: dict[str, Any], url: str) -> NeMoGymChatCompletion:
        """Return a backend's reply as a chat completion with at least one choice; see `checked`."""
        completion = self.checked(NeMoGymChatCompletion, reply, url)
        if not completion.choices:
            raise ModelBackendError("answered 200 with no choices", url=url, status=200)
        return completion

    async def _answer_backend_error(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ModelBackendError)
        logger.warning("%s: %s %s: %s", self.config.name, request.method, request.url.path, error)
        upstream = {"url": error.url, "status": error.status, "attempts": error.attempts}
        headers = None
        if error.retry_after_s is not None:
            headers = {"Retry-After": f"{error.retry_after_s:.0f}"}
        return JSONResponse({"detail": str(error), "upstream": upstream}, error.http_status, headers)

    async def _answer_conversion_error(self, request: Request, error: Exception) -> JSONResponse:
        logger.warning("%s: %s %s: %s", self.config.name, request.method, request.url.path, error)
        return JSONResponse({"detail": str(error)}, 400)


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)
