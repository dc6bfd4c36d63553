"""A model server in front of Chat Completions backends such as vLLM; Responses API requests are converted both ways."""

import zlib
from typing import Any

from fastapi import Body, Request
from pydantic import BaseModel, Field, PrivateAttr, field_validator

from nemo_gym.backend_model import BackendModel, BackendModelConfig
from nemo_gym.errors import ConversionError, ModelBackendError
from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.responses_converter import VLLMConverter
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint


class VLLMModelConfig(BackendModelConfig):
    """Settings of the server.

    Args:
        base_url: The backend's API with its version prefix, or several of the same model. A session stays
            with one of several, so that the backend's prefix cache serves its later turns.
        api_key: The key, sent as a bearer token.
        model: The model that answers; it replaces the one a request names.
        uses_reasoning_parser: Whether the backend separates reasoning from the answer (`--reasoning-parser`);
            otherwise `<think>` tags in the text are taken for it.
        keeps_developer_role: Whether the model's chat template knows the role `developer`; otherwise those
            messages are sent as `system`.
        return_token_id_information: Whether replies must carry token ids and log probabilities, for training.
        chat_template_kwargs: Arguments of the model's chat template, such as `{enable_thinking: false}`.
        extra_body: Fields added to every request that does not have them itself.
    """

    base_url: list[str] = Field(min_length=1)
    api_key: str = Field(default="", repr=False)
    model: str
    uses_reasoning_parser: bool = True
    keeps_developer_role: bool = False
    return_token_id_information: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    extra_body: dict[str, Any] = Field(default_factory=dict)

    @field_validator("base_url", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class VLLMModel(BackendModel):
    """Converts requests for the backend, and its replies back."""

    config: VLLMModelConfig

    _backends: list[NeMoGymAsyncOpenAI] = PrivateAttr()
    _converter: VLLMConverter = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make a client for each backend, and the converter."""
        super().model_post_init(context)
        config = self.config
        self._backends = [self.client_for(url, config.api_key) for url in config.base_url]
        self._converter = VLLMConverter(
            uses_reasoning_parser=config.uses_reasoning_parser,
            keeps_developer_role=config.keeps_developer_role,
            return_token_id_information=config.return_token_id_information,
        )

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        """Answer by a backend's `/chat/completions`, converted both ways."""
        completion, url = await self._complete(
            request, self._converter.responses_to_chat_completion_create_params(body)
        )
        try:
            return self._converter.chat_completion_to_response(body, completion)
        except ConversionError as error:
            raise ModelBackendError(f"answered 200 but {error}", url=url, status=200) from error

    async def chat_completions(  # type: ignore[override]
        self, request: Request, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer by a backend's `/chat/completions`."""
        completion, _ = await self._complete(request, body)
        return completion

    async def _complete(self, request: Request, body: BaseModel) -> tuple[NeMoGymChatCompletion, str]:
        """Return the session's backend's reply, and its address."""
        config = self.config
        payload = config.extra_body | body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        payload["model"] = config.model
        if config.chat_template_kwargs:
            payload["chat_template_kwargs"] = config.chat_template_kwargs | payload.get("chat_template_kwargs", {})
        session_id = request.session[SESSION_ID_KEY]
        backend = self._backends[zlib.crc32(session_id.encode()) % len(self._backends)]
        url = backend.url_of("chat/completions")
        return self.checked_completion(await backend.create_chat_completion(**payload), url), url


if __name__ == "__main__":
    VLLMModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = VLLMModel.run_webserver()
