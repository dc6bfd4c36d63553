"""What the policy sees of a request: the instruction, the offered tools, and the calls made since.

Responses API and Chat Completions requests come to the same here, so the policy answers both alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.openai_utils import (
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponseCreateParamsNonStreaming,
)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Args:
        name: Its name.
        description: What the request says about it.
        parameters: A JSON Schema of type object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.description))


@dataclass
class Call:
    """A call made since the instruction; `result` is None until the tool has answered."""

    call_id: str
    name: str
    arguments: str
    result: str | None = None

    @property
    def error(self) -> str | None:
        """What went wrong, where the result is an error: a JSON object with `error`, or text that begins so."""
        text = (self.result or "").strip()
        try:
            parsed = json.loads(text)
        except ValueError:
            return text if text.lower().startswith("error") else None
        if isinstance(parsed, dict) and parsed.get("error"):
            return str(parsed["error"])
        return None


@dataclass
class Conversation:
    """One request, as the policy sees it.

    Args:
        instruction: The text of the last message of the user.
        tools: The functions that may be called now.
        calls: The calls made since that message, in order.
        parallel: Whether several calls may be made in one turn.
        text: Everything that was sent, for counting tokens.
    """

    instruction: str
    tools: list[Tool]
    calls: list[Call]
    parallel: bool
    text: str


def from_responses(body: NeMoGymResponseCreateParamsNonStreaming) -> Conversation:
    """Return what a Responses API request holds."""
    items = body.input
    if isinstance(items, str):
        plain: list[dict[str, Any]] = [{"role": "user", "content": items}]
    else:
        plain = [item.model_dump(mode="json", exclude_unset=True) for item in items]
    functions = [tool for tool in body.tools if tool.get("type") == "function"]
    return _conversation(plain, functions, body.tool_choice, body.parallel_tool_calls, body.instructions or "")


def from_chat(body: NeMoGymChatCompletionCreateParamsNonStreaming) -> Conversation:
    """Return what a Chat Completions request holds."""
    items: list[dict[str, Any]] = []
    for message in body.messages:
        if message["role"] == "tool":
            output = _text_of(message["content"])
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": output})
            continue
        items.append({"role": message["role"], "content": message.get("content")})
        if message["role"] == "assistant":
            items.extend(
                {"type": "function_call", "call_id": call["id"], **call["function"]}
                for call in message.get("tool_calls") or []
            )
    functions = [tool["function"] for tool in body.tools or [] if tool.get("type") == "function"]
    return _conversation(items, functions, body.tool_choice or "auto", body.parallel_tool_calls, "")


def _conversation(
    items: Iterable[Mapping[str, Any]],
    functions: Iterable[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    parallel: bool,
    instructions: str,
) -> Conversation:
    instruction = ""
    calls: dict[str, Call] = {}
    texts = [instructions]
    for item in items:
        if item.get("type") == "function_call":
            call = Call(item["call_id"], item["name"], item["arguments"])
            calls[call.call_id] = call
            texts.append(f"{call.name} {call.arguments}")
        elif item.get("type") == "function_call_output":
            texts.append(_text_of(item.get("output")))
            if item["call_id"] in calls:
                calls[item["call_id"]].result = texts[-1]
        elif "role" in item:
            texts.append(_text_of(item.get("content")))
            if item["role"] == "user":
                instruction, calls = texts[-1], {}
    offered = _allowed([_tool(function) for function in functions], tool_choice)
    texts.extend(json.dumps([tool.name, tool.description, dict(tool.parameters)]) for tool in offered)
    return Conversation(instruction, offered, list(calls.values()), parallel, "\n".join(texts))


def _tool(function: Mapping[str, Any]) -> Tool:
    return Tool(function["name"], function.get("description") or "", function.get("parameters") or {})


def _allowed(tools: list[Tool], tool_choice: str | Mapping[str, Any]) -> list[Tool]:
    """Return the tools that `tool_choice` leaves: none, all, or the one it names."""
    if tool_choice == "none":
        return []
    if isinstance(tool_choice, Mapping):
        name = tool_choice.get("name") or (tool_choice.get("function") or {}).get("name")
        return [tool for tool in tools if tool.name == name] if name else tools
    return tools


def _text_of(content: Any) -> str:
    """Return the text of a message's content: a string, or parts of which those with text count."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""
