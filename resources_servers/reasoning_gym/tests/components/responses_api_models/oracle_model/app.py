"""A model that looks the answer up, or gives a wrong one: it shows what a score is worth."""

import json
from pathlib import Path
from typing import Any

from fastapi import Body
from pydantic import PrivateAttr

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymEasyInputMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint


class OracleModelConfig(BaseResponsesAPIModelConfig):
    """The settings of the oracle.

    Attributes:
        rows_fpath: The rows whose answers it knows.
        wrong: Whether it gives a wrong answer instead.
    """

    rows_fpath: Path
    wrong: bool


class OracleModel(SimpleResponsesAPIModel):
    """Knows the answer to every question of a file."""

    config: OracleModelConfig

    _answers: dict[str, str] = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Read the answers."""
        rows = map(json.loads, self.config.rows_fpath.read_text(encoding="utf-8").splitlines())
        self._answers = {row["entry"]["question"]: row["entry"]["answer"] for row in rows}

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer the user's question."""
        asked = body.input[-1]
        assert isinstance(asked, NeMoGymEasyInputMessage)
        answer = "wrong" if self.config.wrong else self._answers[str(asked.content)]
        part = {"type": "output_text", "text": f"I have it. <answer>{answer}</answer>", "annotations": []}
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
        return NeMoGymResponse.model_validate(
            {"id": "resp_1", "created_at": 0, "model": "oracle", "output": [message], "status": "completed"}
        )

    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Nobody asks this way."""
        raise NotImplementedError


if __name__ == "__main__":
    OracleModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = OracleModel.run_webserver()
