"""Configuration of sandboxes: names, settings, specs, helpers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nemo_gym.errors import ConfigError
from nemo_gym.sandbox import (
    AsyncSandbox,
    SandboxError,
    SandboxExecResult,
    SandboxSpec,
    SandboxStatus,
    SandboxStoppedError,
    cpu_cap_env,
    create_provider,
    get_provider_class,
    list_providers,
    register_provider,
    resolve_provider_config,
    resolve_provider_metadata,
    rewrite_image,
)
from nemo_gym.sandbox.process_supervisor import DEFAULT_CLEANUP_TIMEOUT, exec_timeout
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.sandbox.providers.registry import _PROVIDERS


@pytest.mark.parametrize(
    ("value", "config"),
    [
        (None, {"type": "local"}),
        (" docker ", {"type": "docker"}),
        ({"type": "local", "isolation": "none"}, {"type": "local", "isolation": "none"}),
        ({"isolation": "none"}, {"type": "local", "isolation": "none"}),
    ],
)
def test_a_provider_config_is_a_name_or_a_mapping(value: Any, config: dict[str, Any]) -> None:
    assert resolve_provider_config(value) == config


@pytest.mark.parametrize("value", [3, ["local"], {"type": 3}, {"type": " "}, ""])
def test_another_provider_config_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="sandbox provider"):
        resolve_provider_config(value)


def test_metadata_are_labels() -> None:
    assert resolve_provider_metadata({"type": "local", "metadata": {"team": 7}}) == {"team": "7"}
    assert resolve_provider_metadata("local") == {}
    with pytest.raises(ConfigError, match="mapping of labels"):
        resolve_provider_metadata({"metadata": ["x"]})


def test_an_unknown_provider_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known are .*local(.|\n)*Did you mean 'local'"):
        create_provider("locl")


@pytest.mark.parametrize(("setting", "value"), [("isolatoin", "none"), ("isolation", "strong")])
def test_a_wrong_setting_is_answered_with_the_known_ones(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}(.|\n)*images_dir"):
        create_provider({"type": "local", setting: value})


def test_a_provider_can_be_registered() -> None:
    class Mine(LocalProvider):
        name = "mine"

    register_provider("mine", Mine)
    try:
        assert get_provider_class("mine") is Mine
        assert "mine" in list_providers()
        assert isinstance(AsyncSandbox({"type": "mine"})._provider, Mine)
    finally:
        del _PROVIDERS["mine"]
    with pytest.raises(ConfigError, match="subclass"):
        register_provider("x", int)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"workdir": "relative"},
        {"workdir": "/a/../b"},
        {"workdir": "/"},
        {"env": {"A=B": "1"}},
        {"env": {"A": "\0"}},
        {"resources": {"processes": 0}},
        {"unknown": 1},
        {"start_timeout_s": 0},
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SandboxSpec(**fields)


async def test_a_sandbox_that_was_not_started_says_so() -> None:
    sandbox = AsyncSandbox("local", SandboxSpec())
    assert sandbox.status is SandboxStatus.CREATED
    with pytest.raises(SandboxStoppedError, match="start"):
        await sandbox.exec("true")
    with pytest.raises(SandboxError, match="start"):
        _ = sandbox.workdir
    await sandbox.stop()
    assert sandbox.status is SandboxStatus.STOPPED


def test_helpers() -> None:
    assert cpu_cap_env(None) == {}
    assert set(cpu_cap_env(1.2).values()) == {"2"}
    assert rewrite_image("docker.io/a/b:1", {"docker.io/": "m/", "docker.io/a/": "n/"}) == "n/b:1"
    assert rewrite_image("other/b") == "other/b"
    assert exec_timeout(10) > 10 + DEFAULT_CLEANUP_TIMEOUT
    assert SandboxExecResult(return_code=0).ok
    assert not SandboxExecResult(return_code=None, timed_out=True).ok
