"""The small pieces that the Responses API and Chat Completions spell differently: content parts, tools, formats, usage.

Pure functions; `nemo_gym.responses_converter` puts conversations together from them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nemo_gym.errors import ConversionError
from nemo_gym.wire.base import as_dict
from nemo_gym.wire.chat import NeMoGymChatCompletionUsage
from nemo_gym.wire.responses import (
    NeMoGymResponseInputTokensDetails,
    NeMoGymResponseOutputTokensDetails,
    NeMoGymResponseUsage,
)

_THINK_START: Final = "<think>"
_THINK_END: Final = "</think>"
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text"})


def content_to_chat(content: str | Iterable[Any]) -> str | list[dict[str, Any]]:
    """Return the content of an input message for a chat message: a lone text part becomes a string.

    Raises:
        ConversionError: When a part has no counterpart.
    """
    if isinstance(content, str):
        return content
    parts = [_part_to_chat(as_dict(part)) for part in content]
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return str(parts[0]["text"])
    return parts


def _part_to_chat(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": part["refusal"]}
    if kind == "input_image":
        return _image_to_chat(part)
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    if kind == "input_file" and part.get("file_url") is None:
        names = ("file_data", "file_id", "filename")
        return {"type": "file", "file": {name: part[name] for name in names if part.get(name) is not None}}
    raise ConversionError(f"a content part of type {kind!r} can't be said in Chat Completions")


def _image_to_chat(part: Mapping[str, Any]) -> dict[str, Any]:
    if not part.get("image_url"):
        raise ConversionError("an image by file id can't be sent to Chat Completions: give its image_url")
    image = {"url": part["image_url"]}
    if part.get("detail") is not None:
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}


def chat_content_to_parts(content: Any) -> str | list[dict[str, Any]]:
    """Return the content of a chat message of the user, system or a tool for a Responses API item."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return [_chat_part_to_input(as_dict(part)) for part in content]


def _chat_part_to_input(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part["text"]}
    if kind == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail")}
    if kind == "file":
        return {"type": "input_file", **part["file"]}
    return dict(part)


def chat_content_to_text(content: Any) -> str:
    """Return the text of an assistant's chat message, whose content may be a string, text parts or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


def tool_to_chat(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function tool in the form of Chat Completions; one that has this form already is kept.

    Raises:
        ConversionError: When the tool is not a function.
    """
    if tool.get("type") != "function":
        raise ConversionError(f"a tool of type {tool.get('type')!r} is not a function; Chat Completions has only those")
    if "function" in tool:
        return dict(tool)
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def tool_choice_to_chat(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """Return `tool_choice` in the form of Chat Completions.

    Raises:
        ConversionError: When it forces a tool that is not a function.
    """
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice["name"]}} if "name" in choice else dict(choice)
    if choice.get("type") == "allowed_tools":
        allowed = {"mode": choice.get("mode", "auto"), "tools": [tool_to_chat(tool) for tool in choice["tools"]]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise ConversionError(f"tool_choice of type {choice.get('type')!r} can't be said in Chat Completions")


def text_format_to_chat(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields `response_format` and `verbosity` for the Responses API's `text`."""
    fields: dict[str, Any] = {}
    if text.get("verbosity") is not None:
        fields["verbosity"] = text["verbosity"]
    wanted = text.get("format")
    if wanted is None or wanted["type"] == "text":
        return fields
    if wanted["type"] == "json_schema":
        schema = {key: value for key, value in wanted.items() if key != "type" and value is not None}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        fields["response_format"] = dict(wanted)
    return fields


def logprobs_to_responses(logprobs: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
    """Return a choice's log probabilities in the form of an output text's; None where there are none."""
    content = (logprobs or {}).get("content")
    return [_logprob(entry) for entry in content] if content else None


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    converted = _bare_logprob(entry)
    converted["top_logprobs"] = [_bare_logprob(top) for top in entry.get("top_logprobs") or ()]
    return converted


def _bare_logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    token = entry["token"]
    return {"token": token, "bytes": entry.get("bytes") or list(token.encode()), "logprob": entry["logprob"]}


def split_think_tags(text: str) -> tuple[str | None, str]:
    """Split what a model without a reasoning parser wrote into reasoning (None without any) and answer.

    Text is cut at the tags and otherwise left alone, so that `join_think_tags` gives it back exactly. The
    opening tag may be missing, as with templates that put it in the prompt; so may the closing one, when the
    model was cut off while thinking.
    """
    before, end, after = text.partition(_THINK_END)
    opened = before.lstrip().startswith(_THINK_START)
    if not end and not opened:
        return None, text
    return (before.lstrip().removeprefix(_THINK_START) if opened else before), after


def join_think_tags(reasoning: str | None, text: str) -> str:
    """Return reasoning and answer as the text a model without a reasoning parser writes."""
    return text if reasoning is None else f"{_THINK_START}{reasoning}{_THINK_END}{text}"


def chat_usage_to_responses(usage: NeMoGymChatCompletionUsage | None) -> NeMoGymResponseUsage | None:
    """Return the usage of a chat reply in the Responses API's names."""
    if usage is None:
        return None
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return NeMoGymResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=NeMoGymResponseInputTokensDetails(
            cached_tokens=usage_detail(prompt, "cached_tokens"),
            cache_write_tokens=usage_detail(prompt, "cache_write_tokens"),
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=NeMoGymResponseOutputTokensDetails(
            reasoning_tokens=usage_detail(completion, "reasoning_tokens")
        ),
        total_tokens=usage.total_tokens or usage.prompt_tokens + usage.completion_tokens,
    )


def usage_detail(details: Mapping[str, Any] | None, name: str) -> int:
    """Return a count of the usage's details; backends leave out, or send null, what they don't count."""
    return int((details or {}).get(name) or 0)
