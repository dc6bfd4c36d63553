"""The top-level settings of logs and traces, checked before anything starts."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from nemo_gym.configuration.loading import describe
from nemo_gym.configuration.validation import Checker
from nemo_gym.errors import did_you_mean
from nemo_gym.logs import setup as logs

TRACING_KEY_NAME: Final = "tracing"
_TRACING_SETTINGS: Final = ("enabled", "endpoint", "sample")


def check_logging(checker: Checker) -> None:
    """Check `logging`.

    Raises:
        ConfigError: A key or value in it is none that it can have.
    """
    key = logs.LOGGING_KEY_NAME
    settings = checker.values.get(key)
    checker.typed(settings, (key,), dict, "a mapping such as {format: json, level: info}")
    settings = settings or {}
    _check_names(checker, key, settings, logs.SETTINGS)
    for name, choices in (("format", logs.FORMATS), ("level", logs.LEVELS)):
        if settings.get(name) is not None:
            checker.one_of(settings[name], (key, name), choices)
    checker.typed(settings.get("count_repeats"), (key, "count_repeats"), bool, "true or false")


def check_tracing(checker: Checker) -> None:
    """Check `tracing`.

    Raises:
        ConfigError: A key or value in it is none that it can have.
    """
    key = TRACING_KEY_NAME
    settings = checker.values.get(key)
    if isinstance(settings, bool):
        return
    checker.typed(settings, (key,), dict, "true, false or a mapping such as {endpoint: http://127.0.0.1:4318}")
    settings = settings or {}
    _check_names(checker, key, settings, _TRACING_SETTINGS)
    checker.typed(settings.get("enabled"), (key, "enabled"), bool, "true or false")
    endpoint = settings.get("endpoint")
    if endpoint is not None and not _is_http_url(endpoint):
        problem = f"expected the address of a collector that takes OTLP over HTTP, got {describe(endpoint)}"
        raise checker.error(problem, (key, "endpoint"), "For example: http://127.0.0.1:4318")
    sample = settings.get("sample")
    is_number = isinstance(sample, int | float) and not isinstance(sample, bool)
    if sample is not None and not (is_number and 0 <= sample <= 1):
        raise checker.error(
            f"expected a number from 0 to 1, got {describe(sample)}", (key, "sample"), "1 traces all rollouts."
        )


def _check_names(checker: Checker, key: str, settings: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or f"There are: {', '.join(known)}"
            raise checker.error("unknown setting", (key, name), hint)


def _is_http_url(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
