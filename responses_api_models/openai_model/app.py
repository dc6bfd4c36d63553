"""A model server in front of an OpenAI-compatible backend that speaks the Responses API: everything is passed on."""

from typing import Any

from fastapi import Body
from pydantic import BaseModel, Field, PrivateAttr

from nemo_gym.backend_model import BackendModel, BackendModelConfig
from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint


class OpenAIModelConfig(BackendModelConfig):
    """Settings of the server.

    Args:
        openai_base_url: The backend's API with its version prefix, such as `https://api.openai.com/v1`.
        openai_api_key: The key, sent as a bearer token.
        openai_model: The model that answers; it replaces the one a request names.
        extra_body: Fields added to every request that does not have them itself.
    """

    openai_base_url: str
    openai_api_key: str = Field(repr=False)
    openai_model: str
    extra_body: dict[str, Any] = Field(default_factory=dict)


class OpenAIModel(BackendModel):
    """Passes requests to the backend and gives its replies back."""

    config: OpenAIModelConfig

    _client: NeMoGymAsyncOpenAI = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make the backend's client."""
        super().model_post_init(context)
        self._client = self.client_for(self.config.openai_base_url, self.config.openai_api_key)

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer by the backend's `/responses`."""
        reply = await self._client.create_response(**self._request(body))
        return self.checked(NeMoGymResponse, reply, self._client.url_of("responses"))

    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer by the backend's `/chat/completions`."""
        reply = await self._client.create_chat_completion(**self._request(body))
        return self.checked_completion(reply, self._client.url_of("chat/completions"))

    def _request(self, body: BaseModel) -> dict[str, Any]:
        """Return what the caller gave, with this server's model."""
        # An item that came back from one of our servers has null in fields it does not use; backends reject some.
        given = body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
        return self.config.extra_body | given | {"model": self.config.openai_model}


if __name__ == "__main__":
    OpenAIModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = OpenAIModel.run_webserver()
