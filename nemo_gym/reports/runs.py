"""One rollouts file in numbers: columns over its rollouts, and its tasks."""

from __future__ import annotations

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nemo_gym.errors import DatasetError
from nemo_gym.global_config import AGENT_REF_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.reports.facts import LARGEST_EXACT, PARTS, Facts, failure_facts, result_facts, slimmed
from nemo_gym.reports.reading import read_lines
from nemo_gym.rollouts.attempts import NG_FAILURE_CLASS_KEY
from nemo_gym.rollouts.io import ROW_DIGEST_KEY
from nemo_gym.rollouts.record import RolloutFiles, RunRecord

MEASURES: Final = (
    "reward",
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "characters",
    "turns",
    "tool_calls",
    "seconds",
)
_LINES_NAMED: Final = 5

Store = Callable[[dict[str, Any]], tuple[int, int]]
"""Takes a rollout's record; returns the block and the place in the block where the page will have it."""


@dataclass(slots=True)
class Task:
    """One row of the dataset in one run.

    Args:
        index: The row; negative for a rollout that names none, which is then a task of its own.
        label: The row's own name, or "".
        text: What was asked, on one line.
        digest: What identifies the row's content, or "".
        results: Its rollouts with a result, as places in the run's columns.
        places: Those of them that have a reward.
        failed: Rollouts without result.
    """

    index: int
    label: str = ""
    text: str = ""
    digest: str = ""
    results: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    failed: int = 0


class Run:
    """The rollouts of one file and the failures beside it, in numbers.

    Args:
        path: The rollouts file.
        pass_threshold: The reward from which on a rollout has passed.

    Attributes:
        mixed: The tasks whose rollouts are of rows with different content.
    """

    def __init__(self, path: Path, pass_threshold: float) -> None:
        self.path = path
        self.pass_threshold = pass_threshold
        self.columns = {name: array("d") for name in MEASURES}
        self.parts = {name: array("d") for name in PARTS}
        self.task_of = array("q")
        self.rollout_index = array("q")
        self.line = array("q")
        self.block = array("q")
        self.place = array("q")
        self.failure: list[str | None] = []
        self.agent: list[str] = []
        self.answers: list[str] = []
        self.notices: list[str] = []
        self.record: RunRecord | None = None
        self.mixed: set[int] = set()
        self._tasks: dict[int, Task] = {}
        self._unindexed = 0
        self._in_task: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.task_of)

    @property
    def tasks(self) -> list[Task]:
        """All tasks, by their index."""
        return [self._tasks[index] for index in sorted(self._tasks)]

    @property
    def scored(self) -> int:
        """How many rollouts have a reward."""
        return sum(not math.isnan(reward) for reward in self.columns["reward"])

    @property
    def failures(self) -> Counter[str]:
        """How many rollouts have no result, by the kind of failure."""
        return Counter(failure for failure in self.failure if failure is not None)

    def mean(self, task: Task, measure: str) -> float:
        """Return the mean of a measure over a task's rollouts; NaN where none has it."""
        column = self.columns[measure]
        values = [column[place] for place in task.results if not math.isnan(column[place])]
        return statistics.fmean(values) if values else math.nan

    def passes(self, task: Task) -> int:
        """Return how many of a task's rollouts passed."""
        reward = self.columns["reward"]
        return sum(reward[place] >= self.pass_threshold for place in task.places)

    def add(self, record: dict[str, Any], line: int, facts: Facts, failure: str | None, at: tuple[int, int]) -> None:
        """Add a rollout, or with `failure` one that has no result."""
        index = _index(record, TASK_INDEX_KEY_NAME)
        if index is None:
            self._unindexed += 1
            index = -self._unindexed
        task = self._tasks.setdefault(index, Task(index))
        task.label = task.label or facts.label
        task.text = task.text or facts.task_text
        digest = _text(record.get(ROW_DIGEST_KEY))
        if task.digest and digest and digest != task.digest:
            self.mixed.add(index)
        task.digest = task.digest or digest
        if failure is not None:
            task.failed += 1
        else:
            task.results.append(len(self))
            if not math.isnan(facts.reward):
                task.places.append(len(self))
        for name, column in self.columns.items():
            column.append(getattr(facts, name))
        for part, column in self.parts.items():
            column.append(facts.parts.get(part, math.nan))
        rollout = _index(record, ROLLOUT_INDEX_KEY_NAME)
        self.task_of.append(index)
        self.rollout_index.append(self._in_task[index] if rollout is None else rollout)
        self._in_task[index] += 1
        self.line.append(line)
        self.block.append(at[0])
        self.place.append(at[1])
        self.failure.append(failure)
        self.agent.append(_agent(record))
        self.answers.append(facts.answer)


def read_run(path: Path, pass_threshold: float, store: Store) -> Run:
    """Read a rollouts file and the failures file beside it.

    Args:
        path: The rollouts file.
        pass_threshold: The reward from which on a rollout has passed.
        store: Takes each rollout's record.

    Raises:
        DatasetError: The file can't be read, is no rollouts file, or there is not one rollout in it.
    """
    run = Run(path, pass_threshold)
    try:
        run.record = RunRecord.load(RolloutFiles(path).run_record)
    except DatasetError as error:
        run.notices.append(str(error))
    for number, record in _records(path, run.notices):
        at = store(slimmed(record, f"line {number} of {path.name}"))
        run.add(record, number, result_facts(record), None, at)
    if len(run) and not _looks_like_rollouts(run):
        raise DatasetError(
            f"{path}: no line looks like a rollout: none has a reward, a response or responses_create_params"
        )
    done = set(zip(run.task_of, run.rollout_index, strict=True))
    run.notices.extend(_doubts(run, len(run) - len(done)))
    _read_failures(run, done, store)
    if not len(run):
        raise DatasetError(f"{path} has no rollouts: the file is empty")
    unscored = len(run) - run.scored - sum(run.failures.values())
    if unscored:
        run.notices.append(
            f"{unscored:,} of {len(run):,} rollouts have no number as their reward; no figure of rewards has them"
        )
    return run


def _doubts(run: Run, repeated: int) -> Iterator[str]:
    """Tell what makes figures of a run other than they seem."""
    if repeated:
        lines = "1 line holds" if repeated == 1 else f"{repeated:,} lines hold"
        yield f"{lines} a rollout that another line holds too (the same row and number); all count"
    if run.mixed:
        tasks = "1 task has" if len(run.mixed) == 1 else f"{len(run.mixed):,} tasks have"
        yield (
            f"{tasks} rollouts of different rows under one number, the first is task {min(run.mixed)}: "
            "this file was put together from several, and its tasks are mixed"
        )


def _read_failures(run: Run, done: set[tuple[int, int]], store: Store) -> None:
    path = RolloutFiles(run.path).failures
    if not path.exists():
        return
    try:
        # Of a rollout that failed in several runs the last failure counts.
        kept = {_identity(record, number): number for number, record in _records(path, [])}
        last = {number for identity, number in kept.items() if identity not in done}
        for number, record in _records(path, run.notices):
            if number in last:
                at = store(slimmed(record, f"line {number} of {path.name}"))
                kind = _text(record.get(NG_FAILURE_CLASS_KEY)) or "unknown"
                run.add(record, number, failure_facts(record), kind, at)
    except DatasetError as error:
        run.notices.append(f"failures are not shown: {error}")


def _records(path: Path, notices: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    bad: list[str] = []
    count = 0
    for line in read_lines(path):
        if line.record is not None:
            yield line.number, line.record
            continue
        count += 1
        if count <= _LINES_NAMED:
            bad.append(f"line {line.number} is {line.problem}")
    if count:
        more = f" and {count - _LINES_NAMED:,} more" if count > _LINES_NAMED else ""
        notices.append(f"{path.name}: left out what can't be read: {', '.join(bad)}{more}")


def shown_names(paths: Sequence[Path]) -> list[str]:
    """Return what files are called: their name, with as many folders as tell files of one name apart."""
    whole = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, whole))):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(set(whole)):
            return names
    return [str(path) for path in paths]


def _looks_like_rollouts(run: Run) -> bool:
    return (
        run.scored > 0
        or any(task.index >= 0 or task.text for task in run.tasks)
        or any(not math.isnan(turns) for turns in run.columns["turns"])
    )


def _identity(record: dict[str, Any], line: int) -> tuple[int, int]:
    """Return which rollout a failure is of; one that does not tell is of its own."""
    task, rollout = _index(record, TASK_INDEX_KEY_NAME), _index(record, ROLLOUT_INDEX_KEY_NAME)
    return (-line, -1) if task is None or rollout is None else (task, rollout)


def _index(record: dict[str, Any], key: str) -> int | None:
    """Return the number of a row or a rollout; None where there is none, or one that a browser would round."""
    index = record.get(key)
    return index if type(index) is int and 0 <= index <= LARGEST_EXACT else None


def _agent(record: dict[str, Any]) -> str:
    reference = record.get(AGENT_REF_KEY_NAME)
    return _text(reference.get("name")) if isinstance(reference, dict) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
