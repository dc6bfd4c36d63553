"""The tokens of a generation, which a trainer needs exactly as sampled: where replies carry them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nemo_gym.wire.base import WireModel
from nemo_gym.wire.chat import NeMoGymChatCompletion, NeMoGymChoice
from nemo_gym.wire.items import REQUIRED_TOKEN_METADATA_FIELDS

_TOKEN_ID: Final = re.compile(r"token_id:(\d+)")


def choice_with_tokens(completion: NeMoGymChatCompletion) -> NeMoGymChoice:
    """Return the first choice with its tokens on the message, wherever the backend put them.

    vLLM gives `token_ids` on the choice and `prompt_token_ids` on the reply (`return_token_ids`), and writes
    the id instead of the text of a token into the log probabilities (`return_tokens_as_token_ids`).
    """
    choice = completion.choices[0]
    if token_fields(choice.message, REQUIRED_TOKEN_METADATA_FIELDS) is not None:
        return choice
    prompt = choice.get("prompt_token_ids") or completion.get("prompt_token_ids")
    logprobs = (choice.logprobs or {}).get("content") or []
    ids = choice.get("token_ids") or _ids_in_logprobs(logprobs)
    if not prompt or not ids or len(ids) != len(logprobs):
        return choice
    values = (prompt, ids, [entry["logprob"] for entry in logprobs])
    message = choice.message.model_dump(exclude_unset=True)
    message |= dict(zip(REQUIRED_TOKEN_METADATA_FIELDS, values, strict=True))
    return NeMoGymChoice.model_validate(choice.model_dump(exclude_unset=True) | {"message": message})


def token_fields(source: Any, names: Iterable[str]) -> dict[str, Any] | None:
    """Return the fields `names` of a message or item, or None where one is missing."""
    get = source.get if isinstance(source, (Mapping, WireModel)) else (lambda _name: None)
    found = {name: get(name) for name in names}
    return found if all(value is not None for value in found.values()) else None


def _ids_in_logprobs(logprobs: Iterable[Mapping[str, Any]]) -> list[int] | None:
    matches = [_TOKEN_ID.fullmatch(entry["token"]) for entry in logprobs]
    return [int(match[1]) for match in matches if match] if all(matches) else None
