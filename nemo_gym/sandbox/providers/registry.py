"""Providers by name. A provider of another package joins with `register_provider`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nemo_gym.errors import ConfigError, did_you_mean
from nemo_gym.sandbox.config import resolve_provider_config
from nemo_gym.sandbox.providers.base import SandboxProvider
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.sandbox.providers.local import LocalProvider

_PROVIDERS: Final[dict[str, type[SandboxProvider]]] = {
    provider.name: provider for provider in (LocalProvider, DockerProvider)
}


def register_provider(name: str, provider: type[SandboxProvider]) -> None:
    """Make `provider` known as `name`, replacing what had that name.

    Raises:
        ConfigError: When `provider` is no class derived from `SandboxProvider`.
    """
    if not (isinstance(provider, type) and issubclass(provider, SandboxProvider)):
        raise ConfigError(f"a sandbox provider is a subclass of SandboxProvider, not {provider!r}")
    _PROVIDERS[name] = provider


def list_providers() -> list[str]:
    """Return the names of the known providers, sorted."""
    return sorted(_PROVIDERS)


def get_provider_class(name: str) -> type[SandboxProvider]:
    """Return the provider class known as `name`.

    Raises:
        ConfigError: When there is none.
    """
    try:
        return _PROVIDERS[name]
    except KeyError:
        raise ConfigError(
            f"there is no sandbox provider {name!r}; known are {', '.join(list_providers())}",
            key="sandbox_provider.type",
            hint=did_you_mean(name, list_providers()),
        ) from None


def create_provider(value: str | Mapping[str, Any] | None = None) -> SandboxProvider:
    """Return the provider that a configuration describes (see `resolve_provider_config`).

    Raises:
        ConfigError: When there is no such provider, or it does not understand its settings.
    """
    config = resolve_provider_config(value)
    return get_provider_class(config["type"])(config)
