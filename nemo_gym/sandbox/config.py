"""The provider part of an environment's configuration: which provider, with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nemo_gym.errors import ConfigError

DEFAULT_PROVIDER: Final = "local"


def resolve_provider_config(value: str | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the provider configuration that `value` means, with its `type`.

    Args:
        value: A provider's name, a mapping `{type: <name>, <setting>: ...}`, or None for the local provider.

    Raises:
        ConfigError: When `value` is something else.
    """
    if value is None:
        return {"type": DEFAULT_PROVIDER}
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"a sandbox provider is a name or a mapping with the key 'type', not {value!r}", key="sandbox_provider"
        )
    config = {str(key): setting for key, setting in value.items()}
    name = config.setdefault("type", DEFAULT_PROVIDER)
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"the type of a sandbox provider is its name, not {name!r}", key="sandbox_provider.type")
    config["type"] = name.strip()
    return config


def resolve_provider_metadata(value: str | Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the labels (`metadata`) of a provider configuration, for `SandboxSpec.metadata`.

    Raises:
        ConfigError: When `metadata` is no mapping.
    """
    metadata = resolve_provider_config(value).get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise ConfigError(
            f"the metadata of a sandbox provider is a mapping of labels, not {metadata!r}",
            key="sandbox_provider.metadata",
        )
    return {str(key): str(label) for key, label in metadata.items()}
