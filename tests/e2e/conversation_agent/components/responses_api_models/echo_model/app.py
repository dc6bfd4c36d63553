"""A model that answers with all that the user has said in the conversation it was sent."""

from fastapi import Body

from nemo_gym.base_responses_api_model import SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymEasyInputMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint


class EchoModel(SimpleResponsesAPIModel):
    """Repeats, and knows nothing from one request to the next."""

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Repeat what the user said, in order."""
        said = [item.content for item in body.input if isinstance(item, NeMoGymEasyInputMessage)]
        part = {"type": "output_text", "text": " ".join(map(str, said)), "annotations": []}
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
        return NeMoGymResponse.model_validate(
            {"id": "resp_1", "created_at": 0, "model": "echo", "output": [message], "status": "completed"}
        )

    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Nobody asks this way."""
        raise NotImplementedError


if __name__ == "__main__":
    EchoModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = EchoModel.run_webserver()
