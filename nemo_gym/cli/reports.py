"""The figures of a rollouts file as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_gym.cli.output import plain_table
from nemo_gym.config_types import AggregateMetrics
from nemo_gym.reward_profile import MetricRow, RewardProfile, TaskProfile, metric_rows

# In every profile already, under "mean reward".
_SHOWN_ALREADY = frozenset({"mean/reward"})


def show_profile(
    console: Console, profile: RewardProfile, agents: Mapping[str, AggregateMetrics], *, with_tasks: bool
) -> None:
    """Print the headline figures, what the environments found worth knowing, and the tasks where asked for."""
    # Every k is in the JSON; people get the powers of two, and the last.
    hidden = {f"pass@{entry.k}" for entry in profile.pass_at_k[:-1] if entry.k & (entry.k - 1)}
    console.print(metrics_table(row for row in metric_rows(profile) if row.name not in hidden))
    for agent, metrics in agents.items():
        own = {name: value for name, value in metrics.key_metrics.items() if name not in _SHOWN_ALREADY}
        if own:
            console.print()
            console.print(Text(f"Metrics of {agent}", style="bold"))
            console.print(plain_table(("metric", "value"), [(name, _number(value)) for name, value in own.items()]))
    if with_tasks:
        console.print()
        console.print(tasks_table(profile.tasks))


def metrics_table(rows: Iterable[MetricRow]) -> Table:
    """Return the table of figures."""
    table = plain_table(("metric", "value", "", "note"), ())
    table.columns[1].justify = "right"
    table.columns[1].no_wrap = True
    table.columns[1].overflow = "ellipsis"  # a number that is cut off must not look like another
    for row in rows:
        value = _number(row.value)
        if row.std_err is not None:
            value += f" +- {_number(row.std_err)}"
        table.add_row(row.name, value, row.unit, Text(row.note, style="dim"))
    return table


def tasks_table(tasks: Iterable[TaskProfile]) -> Table:
    """Return the table of tasks, those that fare worst first."""
    table = plain_table(("task", "rollouts", "failed", "mean reward", "passed"), ())
    for column in table.columns:
        column.justify = "right"
    ordered = sorted(tasks, key=lambda task: (task.mean_reward is not None, task.mean_reward or 0.0, task.task_index))
    for task in ordered:
        passed = "-" if task.pass_rate is None else f"{100 * task.pass_rate:.0f} %"
        table.add_row(str(task.task_index), str(task.rollouts), str(task.failed), _number(task.mean_reward), passed)
    return table


def _number(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"
