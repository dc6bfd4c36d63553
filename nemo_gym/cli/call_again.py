"""The command line of the call that is being made, to show how to make it again with other options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer

from nemo_gym.logs.redaction import MASK, Redactor

_LEFT_OUT: Final = "..."
_SECRET: Final = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)


def call_again(context: typer.Context, changes: Mapping[str, Any], redact: Redactor) -> str:
    """Return a command line for a shell: what was given in the call, with some of it changed.

    Args:
        context: The call.
        changes: Values by the names of parameters; None or False leaves a parameter out.
        redact: Takes secrets out of what stands elsewhere than in an override of their own.

    Returns:
        The command. The value of an override whose key names a secret is replaced by `...`.
    """
    words = context.command_path.split()
    last: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        value = changes[name] if name in changes else context.params.get(name) if given else None
        if parameter.param_type_name == "argument":
            last.extend(_without_secret(str(one)) for one in _values(value))
        else:
            words.extend(_option(max(parameter.opts, key=len), value))
    return shlex.join(redact(word) for word in [*words, *last])


def hides_secrets(command: str) -> bool:
    """Return whether secrets have to be put into a command of `call_again` before it can be used."""
    return MASK in command or f"={_LEFT_OUT}" in command


def _option(name: str, value: Any) -> Iterator[str]:
    for one in _values(value):
        yield name
        if one is not True:
            yield str(one)


def _values(value: Any) -> list[Any]:
    if value is None or value is False:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _without_secret(override: str) -> str:
    key, equals, _ = override.partition("=")
    return f"{key}={_LEFT_OUT}" if equals and _SECRET.search(key) else override
