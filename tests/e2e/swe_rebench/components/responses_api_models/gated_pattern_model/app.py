"""`pattern_model` behind a gate: while it is closed, conversations in which a tool was called wait.

The gate is a folder, closed while it is there. Whoever waits has a file in it.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from nemo_gym.base_responses_api_model import Body
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_models.pattern_model.app import PatternModel, PatternModelConfig


class GatedPatternModelConfig(PatternModelConfig):
    gate: Path


class GatedPatternModel(PatternModel):
    config: GatedPatternModelConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        if not isinstance(body.input, str) and any(item.type == "function_call_output" for item in body.input):
            ticket = self.config.gate / uuid4().hex
            with suppress(FileNotFoundError):
                ticket.touch()
            while ticket.exists():  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.1)
        return await super().responses(body)


if __name__ == "__main__":
    GatedPatternModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = GatedPatternModel.run_webserver()
