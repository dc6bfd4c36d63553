"""A model server without a model: deterministic rules that read the instruction and call the offered tools.

It is the default where no model is configured: the way from the first command to scored rollouts then needs no
key, no network and no weights. Same request, same answer; see `policy` for what it understands.
"""

import hashlib
import json
import time

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, Body, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionMessage,
    NeMoGymChatCompletionMessageToolCall,
    NeMoGymChatCompletionUsage,
    NeMoGymChoice,
    NeMoGymFunction,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputText,
    NeMoGymResponseUsage,
)
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_models.pattern_model.conversation import Conversation, from_chat, from_responses
from responses_api_models.pattern_model.planning import Step
from responses_api_models.pattern_model.policy import Decision, decide

CHARACTERS_PER_TOKEN = 4


class PatternModelConfig(BaseResponsesAPIModelConfig):
    """The settings of the pattern model.

    Attributes:
        model: The name that replies carry when the request names no model.
    """

    model: str = "pattern_model"


class PatternModel(SimpleResponsesAPIModel):
    """Answers by rules, over both APIs."""

    config: PatternModelConfig

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer a request of the Responses API."""
        conversation = from_responses(body)
        decision = decide(conversation)
        key = _key(conversation)
        output: list[NeMoGymResponseFunctionToolCall | NeMoGymResponseOutputMessage] = [
            NeMoGymResponseFunctionToolCall(
                id=f"fc_{key}_{at}", call_id=f"call_{key}_{at}", name=step.tool, arguments=arguments, status="completed"
            )
            for at, (step, arguments) in enumerate(_with_json(decision))
        ]
        if decision.text:
            text = NeMoGymResponseOutputText(text=decision.text, annotations=[])
            output.append(NeMoGymResponseOutputMessage(id=f"msg_{key}", content=[text]))
        read, written = _token_counts(conversation, decision)
        return NeMoGymResponse(
            id=f"resp_{key}",
            created_at=int(time.time()),
            model=body.model or self.config.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls,
            tool_choice=body.tool_choice,
            tools=body.tools,
            status="completed",
            usage=NeMoGymResponseUsage(input_tokens=read, output_tokens=written, total_tokens=read + written),
        )

    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        """Answer a request of the Chat Completions API."""
        conversation = from_chat(body)
        decision = decide(conversation)
        key = _key(conversation)
        calls = [
            NeMoGymChatCompletionMessageToolCall(
                id=f"call_{key}_{at}", function=NeMoGymFunction(name=step.tool, arguments=arguments)
            )
            for at, (step, arguments) in enumerate(_with_json(decision))
        ]
        read, written = _token_counts(conversation, decision)
        message = NeMoGymChatCompletionMessage(content=decision.text or None, tool_calls=calls or None)
        return NeMoGymChatCompletion(
            id=f"chatcmpl-{key}",
            created=int(time.time()),
            model=body.model or self.config.model,
            choices=[NeMoGymChoice(finish_reason="tool_calls" if calls else "stop", message=message)],
            usage=NeMoGymChatCompletionUsage(
                prompt_tokens=read, completion_tokens=written, total_tokens=read + written
            ),
        )


def _with_json(decision: Decision) -> list[tuple[Step, str]]:
    return [(step, json.dumps(step.arguments, ensure_ascii=False)) for step in decision.steps]


def _key(conversation: Conversation) -> str:
    """Return a key for ids: the same conversation has the same, and each of its turns another."""
    return hashlib.sha256(conversation.text.encode()).hexdigest()[:16]


def _token_counts(conversation: Conversation, decision: Decision) -> tuple[int, int]:
    """Return the tokens read and written, counted as one for every `CHARACTERS_PER_TOKEN` characters begun."""
    written = decision.text + "".join(f"{step.tool} {arguments}" for step, arguments in _with_json(decision))
    return _tokens(conversation.text), _tokens(written)


def _tokens(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


if __name__ == "__main__":
    PatternModel.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = PatternModel.run_webserver()
