"""`${...}` in configuration values: OmegaConf's language, its errors told in a user's words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from nemo_gym.configuration.loading import KeyPath, Node, slip_for
from nemo_gym.errors import ConfigError

MISSING: Final = "???"

_MISSING_KEY: Final = re.compile(r"Interpolation key '(?P<key>.*)' not found")
_RAISED: Final = re.compile(r"^\w+ raised while resolving interpolation: ")
_TARGET: Final = re.compile(r"\$\{\s*([^\s:{}]+)\s*\}")
_OPENING: Final = re.compile(r"(\\*)\$\{")
_REFERRED: Final = re.compile(r"\$\{\s*([^\s.:{}]+)")


def referred_keys(root: Node) -> set[str]:
    """Return the top-level keys that `${...}` anywhere in the configuration asks for."""
    return {key for _, node in root.scalars() if isinstance(node.value, str) for key in _REFERRED.findall(node.value)}


def resolve(root: Node, env_file: Path) -> dict[str, Any]:
    """Return the configuration's plain values with each `${...}` replaced by what it stands for.

    Args:
        root: The merged configuration.
        env_file: The user's `env.yaml`, named in the hint of a missing key.

    Raises:
        ConfigError: A value has no such key to refer to, refers to itself, or is `???`.
    """
    try:
        config = OmegaConf.create(root.plain())
        for path, node in root.scalars():
            if isinstance(node.value, str) and (node.value == MISSING or "${" in node.value):
                _resolve_one(config, root, path, env_file)
        resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise _explain(error, root, _path_of(error), env_file) from error
    return resolved


def as_config(plain: dict[str, Any]) -> DictConfig:
    """Return resolved values as a DictConfig that yields just these values: text with `${` is escaped."""
    config: DictConfig = OmegaConf.create(_escaped(plain))
    return config


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escaped(child) for child in value]
    if isinstance(value, str) and "${" in value:
        return _OPENING.sub(lambda match: rf"{match[1] * 2}\${{", value)
    return value


def _resolve_one(config: DictConfig, root: Node, path: KeyPath, env_file: Path) -> None:
    container: Any = config
    for key in path[:-1]:
        container = container[int(key) if OmegaConf.is_list(container) else key]
    try:
        container[int(path[-1]) if OmegaConf.is_list(container) else path[-1]]
    except OmegaConfBaseException as error:
        raise _explain(error, root, path, env_file) from error


def _path_of(error: OmegaConfBaseException) -> KeyPath:
    return tuple(re.sub(r"\[(\d+)\]", r".\1", str(error.full_key or "")).split("."))


def _explain(error: OmegaConfBaseException, root: Node, path: KeyPath, env_file: Path) -> ConfigError:
    written = root.nearest(path).value
    text = written if isinstance(written, str) else "the value"
    first_line = _RAISED.sub("", str(error.msg or error).splitlines()[0])
    hint: str | None = None
    problem = f"{text} can't be resolved: {first_line[:1].lower()}{first_line[1:]}"
    match error:
        case InterpolationKeyError():
            return _missing_key(first_line, text, root, path, env_file)
        case InterpolationToMissingValueError():
            target = _TARGET.search(text)
            problem = f"{text} needs a value that is not set yet (???)"
            hint = _how_to_set(target[1] if target else ".".join(path), env_file)
        case GrammarParseError():
            problem = f"not a valid interpolation: {text!r}"
            hint = r"Expected ${key} or ${key.sub}; write \${ for the two characters themselves."
        case UnsupportedInterpolationType():
            problem = f"{text} asks for a resolver that does not exist"
            hint = "For an environment variable write ${oc.env:NAME}."
        case _ if text == MISSING:
            problem, hint = "the value is not set yet (???)", _how_to_set(".".join(path), env_file)
    return root.error(problem, path, hint)


def _missing_key(message: str, text: str, root: Node, path: KeyPath, env_file: Path) -> ConfigError:
    match = _MISSING_KEY.search(message)
    missing = match["key"] if match else text
    known = [".".join(known_path) for known_path, _ in root.scalars()]
    if isinstance(root.value, dict):
        known += root.value
    near = slip_for(missing, [key for key in known if key != ".".join(path)])
    hint = _how_to_set(missing, env_file)
    if near and hint:
        hint = f"Did you mean '{near}'? Otherwise: {hint[:1].lower()}{hint[1:]}"
    return root.error(f"{text} needs '{missing}', which is not set", path, hint)


def _how_to_set(key: str, env_file: Path) -> str | None:
    if key.startswith((".", "$")):
        return None
    where = "on the command line" if "." in key else f"in {env_file}, or on the command line"
    return f"Set it {where}: {key}=..."
