"""What is told about the work, where nobody reads it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nemo_gym.cli.output import note, show_error, work_console


def test_a_reader_that_went_away_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read, write = os.pipe()
    results = tmp_path / "results"
    with os.fdopen(write, "w") as stream, results.open("w") as stdout:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stdout)
        console = work_console()
        console.print("read")
        assert os.read(read, 100) == b"read\n"
        os.close(read)
        console.print("not read")
        note("not read either")
        show_error("nor this")
        print("a result", file=stdout)
    assert results.read_text() == "a result\n"


def test_a_pipe_that_is_full_for_the_moment_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with os.fdopen(read, "rb") as reader:
        with os.fdopen(write, "w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            for _ in range(100):
                note("x" * 4096)
            assert len(os.read(reader.fileno(), 1 << 20)) > 0
            note("there is room again")
        assert reader.read().endswith(b"there is room again\n")
