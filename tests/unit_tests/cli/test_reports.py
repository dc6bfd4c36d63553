from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from nemo_gym.cli.reports import show_profile
from nemo_gym.config_types import AggregateMetrics
from nemo_gym.reward_profile import profile_rollouts


def rollouts_file(folder: Path, rewards: dict[int, list[float]]) -> Path:
    path = folder / "rollouts.jsonl"
    lines = [
        json.dumps({"_ng_task_index": task, "_ng_rollout_index": index, "_ng_attempt_index": 0, "reward": reward})
        for task, task_rewards in rewards.items()
        for index, reward in enumerate(task_rewards)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def shown(path: Path, agents: dict[str, AggregateMetrics] | None = None, *, with_tasks: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    show_profile(console, profile_rollouts(path), agents or {}, with_tasks=with_tasks)
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_the_headline_figures_are_a_table(tmp_path: Path) -> None:
    lines = shown(rollouts_file(tmp_path, {0: [1.0, 0.0], 1: [1.0, 1.0]}))
    assert "rollouts 4 of 2 tasks" in lines
    assert "mean reward 0.75 +- 0.25 standard error over tasks" in lines
    assert "pass@1 75 % reward >= 1" in lines
    assert "pass@2 100 %" in lines


def test_of_many_ks_the_powers_of_two_and_the_last_are_shown(tmp_path: Path) -> None:
    lines = shown(rollouts_file(tmp_path, {0: [1.0] * 11}))
    assert [line.split()[0] for line in lines if line.startswith("pass@")] == [
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@8",
        "pass@11",
    ]


def test_tasks_come_worst_first(tmp_path: Path) -> None:
    lines = shown(rollouts_file(tmp_path, {0: [1.0], 1: [0.0], 2: [0.5]}), with_tasks=True)
    assert lines[-3:] == ["1 1 0 0 0 %", "2 1 0 0.5 0 %", "0 1 0 1 100 %"]


def test_what_an_environment_finds_worth_knowing_is_shown_as_it_says(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path, {0: [1.0]})
    metrics = AggregateMetrics(key_metrics={"mean/reward": 1.0, "[hard]/accuracy": 0.123456, "judge": "strict"})
    lines = shown(path, {"my_agent": metrics})
    assert "Metrics of my_agent" in lines
    assert "[hard]/accuracy 0.1235" in lines
    assert "judge strict" in lines
    assert not any(line.startswith("mean/reward") for line in lines)
    assert "Metrics of my_agent" not in shown(path, {"my_agent": AggregateMetrics(key_metrics={"mean/reward": 1.0})})


def test_a_narrow_terminal_still_shows_every_value(tmp_path: Path) -> None:
    stream = io.StringIO()
    profile = profile_rollouts(rollouts_file(tmp_path, {0: [1.0, 0.0], 1: [1.0, 1.0]}))
    show_profile(Console(file=stream, width=30), profile, {}, with_tasks=False)
    assert "0.75 +- 0.25" in stream.getvalue()
