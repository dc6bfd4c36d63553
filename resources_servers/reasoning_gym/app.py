"""Reasoning puzzles of the `reasoning-gym` package, scored by the package itself.

There are no tools: the model answers in words, best within `<answer>` tags. The verdict depends on the request
alone, so no state is kept. Scoring may take long (it parses formulas, replays games), so it runs in a thread.
"""

import asyncio
import logging
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.errors import UsageError
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseOutputMessage, NeMoGymResponseOutputText
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from resources_servers.reasoning_gym.tasks import Scorers, extract_answer, load_package

logger = logging.getLogger(__name__)


class ReasoningGymResourcesServerConfig(BaseResourcesServerConfig):
    """The settings of the reasoning_gym server.

    Attributes:
        max_scorers: How many datasets' scorers one worker keeps ready.
        score_timeout: Seconds after which scoring one answer is given up; the request then fails with a 504.
    """

    max_scorers: int = Field(default=64, ge=1)
    score_timeout: float = Field(default=60.0, gt=0)


class DatasetRef(BaseModel):
    """Which dataset a task is from.

    Attributes:
        name: The dataset's name in the package.
        config: The fields of its configuration that differ from the defaults.
    """

    name: str
    config: dict[str, Any] = Field(default_factory=dict)


class ReasoningGymVerifyRequest(BaseVerifyRequest):
    """A finished rollout; other fields of the row are handed through.

    Attributes:
        dataset: Where the task is from.
        entry: The task as the package made it: `question`, `answer`, `metadata`.
    """

    model_config = ConfigDict(extra="allow")

    dataset: DatasetRef
    entry: dict[str, Any]


class ReasoningGymVerifyResponse(ReasoningGymVerifyRequest, BaseVerifyResponse):
    """The verdict.

    Attributes:
        extracted_answer: The answer that was scored; None where the model wrote none.
        scoring_error: Why the package's scorer could not read the answer (the reward is then 0.0), else None.
    """

    extracted_answer: str | None
    scoring_error: str | None


class ReasoningGymResourcesServer(SimpleResourcesServer):
    """Scores answers with each dataset's own scorer."""

    config: ReasoningGymResourcesServerConfig

    _scorers: Scorers = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Prepare the cache of scorers."""
        self._scorers = Scorers(self.config.max_scorers)

    def setup_webserver(self) -> FastAPI:
        """Return the application, after making sure at start-up that the package is there."""
        load_package()
        return super().setup_webserver()

    async def verify(self, body: ReasoningGymVerifyRequest) -> ReasoningGymVerifyResponse:  # type: ignore[override]
        """Reward the score that the task's dataset gives the answer, from 0.0 to 1.0."""
        text = last_message(body.response)
        answer = extract_answer(text) if text else None
        reward, problem = await self._score(body, answer) if answer else (0.0, None)
        verdict = {"reward": reward, "extracted_answer": answer, "scoring_error": problem}
        return ReasoningGymVerifyResponse(**{**dict(body), **verdict})

    async def _score(self, body: ReasoningGymVerifyRequest, answer: str) -> tuple[float, str | None]:
        name = body.dataset.name
        work = asyncio.to_thread(self._scorers.score, name, body.dataset.config, answer, body.entry)
        try:
            return await asyncio.wait_for(work, self.config.score_timeout), None
        except UsageError as error:
            raise HTTPException(422, str(error)) from error
        except TimeoutError as error:
            raise HTTPException(
                504, f"scoring an answer of '{name}' took more than {self.config.score_timeout:g} s"
            ) from error
        except Exception as error:  # noqa: BLE001 - scorers raise all kinds of things at answers they can't read
            logger.warning("the scorer of '%s' could not read an answer: %s: %s", name, type(error).__name__, error)
            return 0.0, f"{type(error).__name__}: {error}"


def last_message(response: NeMoGymResponse) -> str:
    """Return the text of the last message of the model, or "" where it wrote none."""
    for item in reversed(response.output):
        if isinstance(item, NeMoGymResponseOutputMessage):
            return "".join(part.text for part in item.content if isinstance(part, NeMoGymResponseOutputText))
    return ""


if __name__ == "__main__":
    ReasoningGymResourcesServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = ReasoningGymResourcesServer.run_webserver()
