"""Tasks of the `reasoning-gym` package: making them, keeping them as JSON, scoring answers to them.

The package is an optional extra and takes seconds to import, so it is imported where it is first needed.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from nemo_gym.errors import MissingExtraError, UsageError, did_you_mean

_TUPLE_KEY: Final = "__tuple__"
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def load_package() -> ModuleType:
    """Import and return the package.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        import reasoning_gym  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("reasoning-gym", "the reasoning_gym resources server") from error
    module: ModuleType = reasoning_gym
    return module


def dataset_names() -> list[str]:
    """Return the names of the package's datasets."""
    load_package()
    from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]  # noqa: PLC0415

    return sorted(DATASETS)


def make_dataset(name: str, config: Mapping[str, Any]) -> Any:
    """Return one of the package's datasets.

    Args:
        name: Its name, such as "chain_sum".
        config: Fields of its configuration class, such as `min_terms`; its defaults hold for the rest.

    Raises:
        UsageError: If there is no such dataset, or it does not take this configuration.
    """
    package = load_package()
    names = dataset_names()
    if name not in names:
        hint = did_you_mean(name, names)
        raise UsageError(f"reasoning-gym has no dataset '{name}'. {hint or 'List them with --list.'}")
    try:
        return package.create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"dataset '{name}' does not take this configuration: {error}") from error


def storable(dataset: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return `entry` as JSON keeps it and such that its answers are scored as before.

    Some scorers tell tuples from lists, which JSON does not; their entries keep tuples as `{"__tuple__": [...]}`.

    Raises:
        UsageError: If the entry can't be kept as JSON.
    """
    answer = entry["answer"]
    for plain in (dict(entry), _mark_tuples(dict(entry))):
        try:
            kept: dict[str, Any] = json.loads(json.dumps(plain))
        except TypeError as error:
            raise UsageError(f"an entry of this dataset can't be written as JSON: {error}") from error
        if answer is None or dataset.score_answer(answer, restored(kept)) == dataset.score_answer(answer, dict(entry)):
            return kept
    raise UsageError("an entry of this dataset would be scored otherwise once it is written as JSON")


def restored(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the tuples that `storable` marked."""
    result: dict[str, Any] = _unmark_tuples(entry)
    return result


def extract_answer(text: str) -> str:
    """Return what stands in the last `<answer>` tag of `text`, else all of it, stripped."""
    tagged = _ANSWER.findall(text)
    return str(tagged[-1] if tagged else text).strip()


class Scorers:
    """The datasets whose scorers are in use, the least recently used dropped beyond a limit. Safe among threads.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._datasets: OrderedDict[str, tuple[Any, threading.Lock]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._datasets)

    def score(self, name: str, config: Mapping[str, Any], answer: str, entry: Mapping[str, Any]) -> float:
        """Return the dataset's own score of `answer`. Blocks, perhaps for seconds.

        Raises:
            UsageError: If there is no such dataset, or it does not take this configuration.
        """
        dataset, lock = self._get(name, config)
        with lock:
            return float(dataset.score_answer(answer, entry=restored(entry)))

    def _get(self, name: str, config: Mapping[str, Any]) -> tuple[Any, threading.Lock]:
        key = json.dumps([name, config], sort_keys=True)
        with self._lock:
            if key not in self._datasets:
                self._datasets[key] = (make_dataset(name, config), threading.Lock())
                while len(self._datasets) > self._limit:
                    self._datasets.popitem(last=False)
            self._datasets.move_to_end(key)
            return self._datasets[key]


def _mark_tuples(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE_KEY: [_mark_tuples(item) for item in value]}
    if isinstance(value, list):
        return [_mark_tuples(item) for item in value]
    if isinstance(value, dict):
        return {key: _mark_tuples(item) for key, item in value.items()}
    return value


def _unmark_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmark_tuples(item) for item in value]
    if isinstance(value, Mapping):
        if value.keys() == {_TUPLE_KEY}:
            return tuple(_unmark_tuples(item) for item in value[_TUPLE_KEY])
        return {key: _unmark_tuples(item) for key, item in value.items()}
    return value
