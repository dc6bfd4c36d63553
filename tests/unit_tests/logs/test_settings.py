"""Settings of logs and traces that can't be are refused with the key and what was expected."""

from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError, MissingExtraError
from nemo_gym.global_config import load_global_config
from nemo_gym.server.tracing import TracingSettings, start_tracing


def load(folder: Path, *overrides: str) -> dict[str, Any]:
    (folder / "some.yaml").write_text("policy_model_name: a-model\n")
    return dict(load_global_config(["some.yaml"], overrides, working_dir=folder).config_dict)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("logging=json", "logging: expected a mapping such as {format: json, level: info}, got the text 'json'"),
        ("logging.format=jsn", "logging.format: expected one of text, json, got the text 'jsn'\nDid you mean 'json'?"),
        ("logging.level=warn", "info, warning, error, got the text 'warn'\nDid you mean 'warning'?"),
        ("logging.count_repeats=3", "logging.count_repeats: expected true or false, got the number 3"),
        ("logging.levle=info", "logging.levle: unknown setting\nDid you mean 'level'?"),
        ("tracing=on-please", "tracing: expected true, false or a mapping such as {endpoint:"),
        ("tracing.endpoint=localhost:4318", "tracing.endpoint: expected the address of a collector that takes OTLP"),
        ("tracing.sample=2", "tracing.sample: expected a number from 0 to 1, got the number 2"),
        ("tracing.sample=true", "tracing.sample: expected a number from 0 to 1, got the truth value true"),
        ("tracing.enabled=maybe", "tracing.enabled: expected true or false, got the text 'maybe'"),
        ("tracing.colour=red", "tracing.colour: unknown setting\nThere are: enabled, endpoint, sample"),
    ],
)
def test_a_setting_that_can_not_be_is_refused(tmp_path: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("command line")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), None),
        (("tracing=false",), None),
        (("tracing=true",), TracingSettings()),
        (("tracing.endpoint=http://collector:4318",), TracingSettings("http://collector:4318")),
        (("tracing.sample=0.1",), TracingSettings(sample=0.1)),
        (("tracing.sample=0.1", "tracing.enabled=false"), None),
    ],
)
def test_traces_are_recorded_where_the_configuration_asks_for_them(
    tmp_path: Path, overrides: tuple[str, ...], expected: TracingSettings | None
) -> None:
    assert TracingSettings.of(load(tmp_path, *overrides)) == expected


def test_the_standard_variable_turns_traces_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert start_tracing({"tracing": True}, "counter") is None


@pytest.mark.parametrize("variable", ["OTEL_BSP_MAX_QUEUE_SIZE=100", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=many"])
def test_a_standard_variable_that_can_not_be_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    # Limits are read by the import.
    for module in ("nemo_gym.server.otel", "opentelemetry.sdk.trace"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match=rf"(?s)tracing.*OpenTelemetry.*variables .*{name}"):
        start_tracing({"tracing": True}, "counter")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_sdk(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "nemo_gym.server.otel", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_sdk)
    with pytest.raises(MissingExtraError, match=r"'tracing' in the configuration .* pip install 'nemo-gym\[otel\]'"):
        start_tracing({"tracing": True}, "counter")
