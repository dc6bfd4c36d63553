"""What `gym eval run` shows at its end, early or not: counts, figures, failures, where files are, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym.cli.call_again import hides_secrets
from nemo_gym.cli.output import plain_table, shown_path
from nemo_gym.cli.rendering import duration, one_line
from nemo_gym.cli.reports import show_profile
from nemo_gym.config_types import AggregateMetrics
from nemo_gym.errors import NemoGymError
from nemo_gym.reward_profile import RewardProfile, profile_as_json, profile_rollouts
from nemo_gym.rollouts.ledger import CollectionSummary
from nemo_gym.rollouts.record import RolloutFiles
from nemo_gym.rollouts.tally import RunTally

_REASON_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run that has ended.

    Args:
        files: Its files.
        counts: How far it came.
        tally: What it has come to, event by event.
        call_again: The command that makes what is left.
        logs: The folder with the logs of the servers; None where none is known.
    """

    files: RolloutFiles
    counts: CollectionSummary
    tally: RunTally
    call_again: str
    logs: Path | None

    def show(self, console: Console, profile: RewardProfile, agents: Mapping[str, AggregateMetrics]) -> None:
        """Show a run that came to its end."""
        console.print()
        show_profile(console, profile, agents, with_tasks=False)
        self._show_run(console, self._paths())

    def show_unfinished(self, console: Console) -> None:
        """Show a run that ended early: what it has so far; trouble in reading that is left to the next call."""
        console.print()
        try:
            profile = profile_rollouts(self.files.output)
        except NemoGymError as error:
            console.print(Text(str(error), style="dim"), soft_wrap=True)
        else:
            if profile.rollouts:
                show_profile(console, profile, {}, with_tasks=False)
        paths = self._paths()
        paths.pop("metrics", None)  # of an earlier run
        self._show_run(console, paths)

    def to_json(self, profile: RewardProfile, agents: Mapping[str, AggregateMetrics]) -> dict[str, Any]:
        """Return it as a JSON object."""
        counts = self.counts
        return {
            "total": counts.total,
            "already_done": counts.already_done,
            "finished": counts.finished,
            "failed": counts.failed,
            "run_again": counts.run_again,
            "lost_sessions": counts.lost_sessions,
            "duration_s": counts.duration_s,
            "rollouts_per_s": _per_second(counts),
            "failures": {
                name: {"count": kind.count, "most_frequent_reason": kind.most_frequent_reason}
                for name, kind in self.tally.failures.items()
            },
            "files": {name: str(path.resolve()) for name, path in self._paths().items()},
            "call_again": None if counts.complete else self.call_again,
            "metrics": profile_as_json(profile, agents),
        }

    def _show_run(self, console: Console, paths: Mapping[str, Path]) -> None:
        console.print()
        console.print(_counts_table(self.counts, self.tally))
        if self.tally.failures:
            console.print()
            console.print(_failures_table(self.tally))
        console.print()
        for name, path in paths.items():
            console.print(Text(f"{name}: {shown_path(path)}"), soft_wrap=True)
        for what, command in self._next():
            console.print(Text.assemble((f"{what}: ", "bold"), command), soft_wrap=True)

    def _paths(self) -> dict[str, Path]:
        """Return what there is to look at."""
        files = self.files
        paths = {"rollouts": files.output, "metrics": files.metrics, "failures": files.failures, "logs": self.logs}
        return {name: path for name, path in paths.items() if path is not None and path.exists()}

    def _next(self) -> Iterator[tuple[str, str]]:
        counts = self.counts
        if counts.already_done + counts.finished:
            yield "to read them", shlex.join(["gym", "eval", "report", shown_path(self.files.output)])
        left = counts.total - counts.already_done - counts.finished
        secrets = ", with its secrets put in" if hides_secrets(self.call_again) else ""
        if left > counts.failed:
            yield f"to go on with the {left} that are left{secrets}", self.call_again
        elif left:
            yield f"to make the {left} that failed again{secrets}", self.call_again


def _counts_table(counts: CollectionSummary, tally: RunTally) -> Table:
    left = counts.total - counts.already_done - counts.finished - counts.failed
    earlier = f"; an earlier run had finished {counts.already_done}" if counts.already_done else ""
    rows = [("finished", str(counts.finished), f"of {counts.total} rollouts{earlier}")]
    if counts.failed:
        rows.append(("failed", str(counts.failed), "they have no reward and count in no figure"))
    if left:
        rows.append(("not made", str(left), "under way or waiting when the run ended"))
    if counts.run_again:
        remarks = [f"{counts.lost_sessions} of them for a lost session"] if counts.lost_sessions else []
        if tally.troubles.count:
            who = "others mostly" if remarks else "mostly"
            remarks.append(f"{who}: {one_line(tally.troubles.most_frequent_reason, _REASON_LENGTH)}")
        rows.append(("run again", str(counts.run_again), ", ".join(remarks)))
    rows.append(("took", duration(counts.duration_s), f"{_per_second(counts):.3g} rollouts/s"))
    table = plain_table(("this run", "", ""), ())
    table.columns[1].justify = "right"
    table.columns[1].no_wrap = True
    table.columns[2].overflow = "ellipsis"  # a number that is folded would be two
    for name, value, remark in rows:
        table.add_row(name, value, Text(remark, style="dim"))
    return table


def _failures_table(tally: RunTally) -> Table:
    table = plain_table(("failures", "", "most frequent reason"), ())
    table.columns[1].justify = "right"
    for name, kind in sorted(tally.failures.items(), key=lambda item: -item[1].count):
        reason = one_line(kind.most_frequent_reason, _REASON_LENGTH)
        table.add_row(Text(one_line(name, _REASON_LENGTH), style="red"), str(kind.count), Text(reason))
    return table


def _per_second(counts: CollectionSummary) -> float:
    ended = counts.finished + counts.failed
    return ended / counts.duration_s if counts.duration_s else 0.0
