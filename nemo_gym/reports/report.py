"""`write_report`: one rollouts file, or two to compare, into one HTML page.

Each rollouts file is read once, line by line. Memory holds the numbers of every rollout and the texts of one block;
the rest waits compressed in a temporary file beside the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from nemo_gym import __version__
from nemo_gym.errors import DatasetError, NemoGymError, UsageError
from nemo_gym.metrics import expected_best_of_k, reported_ks
from nemo_gym.reports.blocks import BlockStore
from nemo_gym.reports.comparison import FEW_TASKS, Comparison, PairBy, compare, run_intervals
from nemo_gym.reports.figures import all_figures, names_of
from nemo_gym.reports.page import check_replaceable, page, write_page
from nemo_gym.reports.runs import Run, Task, read_run, shown_names
from nemo_gym.reward_profile import PASS_THRESHOLD
from nemo_gym.rollouts.record import RolloutFiles


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """What a report came to.

    Args:
        path: The page.
        rollouts: Rollouts with a result in it, of each run.
        failed: Rollouts without one, of each run.
        notices: What the reader of the figures should know, of each run.
        comparison: Of two runs.
    """

    path: Path
    rollouts: tuple[int, ...]
    failed: tuple[int, ...]
    notices: tuple[tuple[str, ...], ...]
    comparison: Comparison | None


def default_output(rollouts: Sequence[Path]) -> Path:
    """Return where a report is written unless it is said: beside the first rollouts file, named after it.

    Raises:
        DatasetError: A rollouts file is a folder.
        UsageError: The first is a device or a pipe.
    """
    _check_no_folder(rollouts)
    first = rollouts[0]
    if first.exists() and not first.is_file():
        raise UsageError(f"{first} is no file that a report could stand beside; say where with --output")
    if len(rollouts) == 1:
        return first.with_name(f"{first.stem}_report.html")
    other = PurePath(shown_names(rollouts)[1]).with_suffix("").as_posix().replace("/", "_")
    return first.with_name(f"{first.stem}_and_{other}_report.html")


def write_report(
    rollouts: Sequence[Path],
    output: Path,
    *,
    pass_threshold: float = PASS_THRESHOLD,
    pair_by: PairBy | None = None,
) -> WrittenReport:
    """Write a report.

    Args:
        rollouts: One rollouts file, or two: the second is compared with the first.
        output: The page.
        pass_threshold: The reward from which on a rollout has passed.
        pair_by: See `comparison.compare`.

    Raises:
        DatasetError: A rollouts file can't be read, is none, or is empty.
        UsageError: The output is one of the inputs or something else that is no report, or the threshold is no number.
        NemoGymError: The page can't be written.
    """
    if not math.isfinite(pass_threshold):
        raise UsageError(f"--pass-threshold {pass_threshold}: expected a number")
    _check_no_folder(rollouts)
    _check_inputs_stay(rollouts, output)
    check_replaceable(output)
    try:
        with BlockStore(output.parent) as store:
            runs = [read_run(path, pass_threshold, store.add) for path in rollouts]
            comparison = compare(runs[0], runs[1], pair_by) if len(runs) == 2 else None
            files = shown_names(rollouts)
            names = names_of(files)
            single = comparison is None
            facts = {
                "version": __version__,
                "threshold": pass_threshold,
                "few_tasks": FEW_TASKS,
                "runs": [
                    _run_facts(run, file, name, with_figures=single)
                    for run, file, name in zip(runs, files, names, strict=True)
                ],
                "figures": [asdict(figure) for figure in all_figures(runs, names, comparison)],
                "comparison": _comparison_facts(comparison) if comparison else None,
            }
            write_page(output, page(facts, store.read(), " and ".join(files)))
    except OSError as error:
        raise NemoGymError(f"can't write {output}: {error.strerror}") from error
    return WrittenReport(
        path=output,
        rollouts=tuple(len(run) - sum(run.failures.values()) for run in runs),
        failed=tuple(sum(run.failures.values()) for run in runs),
        notices=tuple(tuple(run.notices) for run in runs),
        comparison=comparison,
    )


def _check_no_folder(rollouts: Iterable[Path]) -> None:
    for path in rollouts:
        try:
            if path.is_dir():
                inside = path / "rollouts.jsonl"
                example = f", such as {inside}" if inside.is_file() else ""
                raise DatasetError(f"{path} is a folder; expected a rollouts file{example}")
        except OSError as error:
            raise DatasetError(f"can't read {path}: {error.strerror}") from error


def _check_inputs_stay(rollouts: Iterable[Path], output: Path) -> None:
    for path in rollouts:
        beside = RolloutFiles(path)
        for taken in (path, beside.failures, beside.run_record, beside.metrics):
            with suppress(OSError):  # one of them is missing
                if taken.samefile(output):
                    raise UsageError(f"{output} is what the report is made from; choose another --output")


def _run_facts(run: Run, file: str, name: str, *, with_figures: bool) -> dict[str, Any]:
    """Return what the page knows of a run; its own figures only where it is not compared, for then they show others."""
    tasks = run.tasks
    position = {task.index: at for at, task in enumerate(tasks)}
    kinds = {kind: at for at, kind in enumerate(run.failures)}
    agents = {agent: at for at, agent in enumerate(sorted(set(run.agent)))}
    record = run.record
    return {
        "name": name,
        "file": file,
        "notices": run.notices,
        "made": {
            "agent": record.agent,
            "settings": record.settings,
            "started_at": record.started_at,
            "num_repeats": record.num_repeats,
        }
        if record
        else None,
        "intervals": {name: asdict(interval) for name, interval in run_intervals(run).items()} if with_figures else {},
        "pass_at_k": _pass_at_k(run, tasks) if with_figures else [],
        "failures": dict(run.failures.most_common()),
        "kinds": list(kinds),
        "agents": list(agents),
        "tasks": [_task_facts(run, task) for task in tasks],
        "rollouts": {
            "task": [position[index] for index in run.task_of],
            "rollout": list(run.rollout_index),
            "line": list(run.line),
            "block": list(run.block),
            "place": list(run.place),
            "kind": [-1 if kind is None else kinds[kind] for kind in run.failure],
            "agent": [agents[agent] for agent in run.agent],
            "answer": run.answers,
            **{measure: [_number(value) for value in column] for measure, column in run.columns.items()},
        },
    }


def _task_facts(run: Run, task: Task) -> dict[str, Any]:
    return {
        "index": task.index,
        "label": task.label,
        "text": task.text,
        "scored": len(task.places),
        "passed": run.passes(task),
        "failed": task.failed,
        "reward": _number(run.mean(task, "reward")),
        "tokens": _number(run.mean(task, "output_tokens")),
        "turns": _number(run.mean(task, "turns")),
        "seconds": _number(run.mean(task, "seconds")),
    }


def _pass_at_k(run: Run, tasks: Sequence[Task]) -> list[dict[str, float]]:
    reward = run.columns["reward"]
    passed = [[float(reward[at] >= run.pass_threshold) for at in task.places] for task in tasks if task.places]
    found = []
    for k in reported_ks(max(map(len, passed), default=0)):
        shares = [expected_best_of_k(task, k) for task in passed if len(task) >= k]
        found.append({"k": k, "value": math.fsum(shares) / len(shares), "tasks": len(shares), "of": len(passed)})
    return found


def _comparison_facts(comparison: Comparison) -> dict[str, Any]:
    return {
        "paired_by": comparison.paired_by,
        "only_first": comparison.only_first,
        "only_second": comparison.only_second,
        "better": comparison.better,
        "same": comparison.same,
        "worse": comparison.worse,
        "sign_test": comparison.sign_test,
        "measures": [asdict(measured) for measured in comparison.measures],
        "pairs": [
            {
                "first": pair.first.index,
                "second": pair.second.index,
                "difference": pair.difference,
                "passes": asdict(pair.pass_difference),
            }
            for pair in comparison.pairs
        ],
    }


def _number(value: float) -> float | int | None:
    """Return a number as short as it can be written without loss; None for NaN."""
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
