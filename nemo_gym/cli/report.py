"""`gym eval report`: a rollouts file, or two to compare, as one HTML page."""

from __future__ import annotations

import webbrowser
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_gym.cli.options import PassThreshold
from nemo_gym.cli.output import note, shown_path, write_line
from nemo_gym.errors import MissingExtraError
from nemo_gym.reward_profile import PASS_THRESHOLD

if TYPE_CHECKING:
    from nemo_gym.reports.report import WrittenReport

_EXTRA_PACKAGES = ("numpy", "plotly")

EPILOG = """\
Examples:

gym eval report results/example_session_state_mgmt/20260102T030405Z/rollouts.jsonl

gym eval report before.jsonl after.jsonl --output compared.html --open

The page holds the rollouts themselves and needs nothing else: no server, no network. Whoever has it can read them.
"""


class PairBy(StrEnum):
    """What tells that tasks of two runs are the same."""

    ROW = "row"
    INDEX = "index"


def report(
    rollouts: Annotated[Path, typer.Argument(metavar="ROLLOUTS", help="A rollouts file.", show_default=False)],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="ROLLOUTS_B", help="Another one, compared with the first.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page.", show_default="beside ROLLOUTS, named after it"
        ),
    ] = None,
    pass_threshold: PassThreshold = PASS_THRESHOLD,
    pair_by: Annotated[
        PairBy | None,
        typer.Option(
            help="What tells that tasks of two runs are the same: their row's content or its number.",
            show_default="the content, where both files tell it",
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Write a rollouts file as an HTML page with plots and every rollout; or compare two of them."""
    try:
        from nemo_gym.reports.report import default_output, write_report  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA_PACKAGES:
            raise
        raise MissingExtraError("report", "gym eval report") from error
    paths = [rollouts] if other is None else [rollouts, other]
    written = write_report(
        paths,
        output or default_output(paths),
        pass_threshold=pass_threshold,
        pair_by=None if pair_by is None else pair_by.value,
    )
    _tell(written)
    if open_it and not webbrowser.open(written.path.resolve().as_uri()):
        note("no browser could be opened", style="yellow")


def _tell(written: WrittenReport) -> None:
    letters = ("A: ", "B: ") if written.comparison is not None else ("",)
    for letter, rollouts, failed, notices in zip(
        letters, written.rollouts, written.failed, written.notices, strict=True
    ):
        for text in notices:
            note(f"{letter}{text}", style="yellow")
        note(f"{letter}{rollouts:,} rollout{'' if rollouts == 1 else 's'}, {failed:,} failed")
    comparison = written.comparison
    if comparison is not None and comparison.paired_by is None:
        note("no task has a result in both runs: they are compared as a whole (see --pair-by)", style="yellow")
    elif comparison is not None:
        note(f"tasks: {comparison.better} better, {comparison.worse} worse, {comparison.same} the same")
    write_line(f"report: {shown_path(written.path)}")
