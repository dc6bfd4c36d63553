"""The base of model servers: the OpenAI Responses API (and Chat Completions) in front of any backend.

A model server keeps no session state: with several workers, any of them answers any request.
"""

from abc import abstractmethod

from fastapi import Body as Body, FastAPI

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server.base import SimpleServer, add_model_route


class BaseResponsesAPIModelConfig(BaseRunServerInstanceConfig):
    """The settings of a model server."""


class SimpleResponsesAPIModel(SimpleServer):
    """A model server: subclass it and implement `responses` and `chat_completions`."""

    config: BaseResponsesAPIModelConfig

    def setup_webserver(self) -> FastAPI:
        """Return the application; a subclass may add routes to it."""
        app = self.create_webserver()
        add_model_route(app, "/v1/responses", self.responses, NeMoGymResponse)
        add_model_route(app, "/v1/chat/completions", self.chat_completions, NeMoGymChatCompletion)
        return app

    @abstractmethod
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer a request of the Responses API."""

    @abstractmethod
    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer a request of the Chat Completions API."""
