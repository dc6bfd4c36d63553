"""Programs that the benchmarks run: what is told of one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness.run import Run
from benchmarks.harness.servers import all_accepting, free_port, running_process

ALERTS = """\
[NOTICE]   (77) : haproxy version is 2.6.12
[ALERT]    (77) : Binding [h.cfg:10] for frontend front: cannot bind socket
[ALERT]    (77) : Some protocols failed to start their listeners! Exiting.
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "work").mkdir()
    return Run(tmp_path, 1, True, Console(quiet=True))


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (ALERTS, "Binding [h.cfg:10] for frontend front: cannot bind socket; Some protocols failed to start"),
        ("Traceback:\nOSError: it is in use\n\n", "OSError: it is in use"),
        ("x" * 1000 + "\n", "...xxx"),
        ("", "nothing"),
    ],
)
async def test_why_a_program_failed_is_told_in_one_line(run: Run, output: str, said: str) -> None:
    async def fail() -> None:
        async with running_process(run, ["sh", "-c", f"printf '%s' '{output}' >&2"]) as pid:
            await all_accepting(run, "127.0.0.1", free_port(), pid, 1)

    with pytest.raises(ChildProcessError) as caught:
        await fail()
    told = str(caught.value)
    assert told.startswith(f"the server ended while it was starting; the program said: {said}")
    assert "\n" not in told
    assert len(told) < 400


async def test_a_program_that_is_not_there_is_told(run: Run) -> None:
    async def fail() -> None:
        async with running_process(run, [str(run.folder / "no-such-program")]):
            pass

    with pytest.raises(ChildProcessError, match=r"the program did not start; .*no-such-program"):
        await fail()
