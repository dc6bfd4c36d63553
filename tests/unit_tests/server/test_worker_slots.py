"""What a main process tells of its workers: who has which slot, and what was in it before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nemo_gym.server.worker_slots import SLOTS_FILE, OpenSessions, WorkerRecords, WorkerSlots, describe_exit


def told(folder: Path) -> list[tuple[int, int, int, str, str | None, int]]:
    """What stands in the file: slot, process, restarts, state, last exit and lost sessions of each worker."""
    records = WorkerRecords.read(folder)
    assert records is not None
    return [(it.slot, it.pid, it.restarts, it.state, it.last_exit, it.sessions_lost) for it in records.workers]


@pytest.fixture
def slots(tmp_path: Path) -> WorkerSlots:
    slots = WorkerSlots(tmp_path)
    slots.expect(2)
    for pid in (11, 12):
        slots.started(pid)
        slots.serves(pid)
    return slots


def left_open(folder: Path, pid: int, sessions: int) -> None:
    """Leave what a worker with another process id would have left."""
    mine = OpenSessions(folder)
    mine.hold(sessions)
    (folder / f"sessions.{os.getpid()}").rename(folder / f"sessions.{pid}")


def test_workers_have_slots_in_the_order_of_their_start(slots: WorkerSlots, tmp_path: Path) -> None:
    assert told(tmp_path) == [(0, 11, 0, "serving", None, 0), (1, 12, 0, "serving", None, 0)]
    records = WorkerRecords.read(tmp_path)
    assert records is not None
    assert records.num_workers == 2
    assert stat.S_IMODE((tmp_path / SLOTS_FILE).stat().st_mode) == 0o600


def test_a_replacement_has_the_slot_and_the_story_of_the_one_that_died(slots: WorkerSlots, tmp_path: Path) -> None:
    left_open(tmp_path, 11, 5)
    slots.ended(11, -9)
    assert told(tmp_path) == [(1, 12, 0, "serving", None, 0), (0, 0, 0, "ended", "killed by SIGKILL", 5)]
    slots.started(13)
    assert told(tmp_path)[1] == (0, 13, 1, "starting", "killed by SIGKILL", 5)
    left_open(tmp_path, 13, 1)
    slots.ended(13, 1)
    slots.started(14)
    assert told(tmp_path)[1] == (0, 14, 2, "starting", "ended with exit code 1", 6)
    assert {path.name for path in tmp_path.iterdir()} == {SLOTS_FILE}


def test_one_that_was_given_up_says_why(slots: WorkerSlots, tmp_path: Path) -> None:
    slots.ended(12, -9, because="no sign of life for 60 s")
    slots.started(13)
    assert told(tmp_path)[1][4] == "no sign of life for 60 s; killed by SIGKILL"


def test_one_that_did_not_stop_in_time_says_so(slots: WorkerSlots, tmp_path: Path) -> None:
    slots.leaves(12)
    slots.ended(12, -9)
    slots.started(13)
    assert told(tmp_path)[1][4] == "told to stop; killed by SIGKILL"


def test_while_one_process_takes_a_slot_over_both_are_told_and_what_was_lost_counts_once(
    slots: WorkerSlots, tmp_path: Path
) -> None:
    left_open(tmp_path, 11, 3)
    slots.ended(11, -11)
    slots.started(13)
    slots.serves(13)
    slots.started(14, replaces=13)
    slots.serves(14)
    slots.leaves(13)
    assert told(tmp_path)[1:] == [
        (0, 13, 1, "leaving", "killed by SIGSEGV", 0),
        (0, 14, 2, "serving", None, 3),
    ]
    slots.ended(13, -15)
    assert told(tmp_path)[1:] == [(0, 14, 2, "serving", "told to stop", 3)]


def test_only_those_that_were_not_told_to_stop_have_died(slots: WorkerSlots, tmp_path: Path) -> None:
    slots.ended(11, -9)
    slots.started(13)
    slots.leaves(13)
    slots.ended(13, -15)
    slots.started(14)
    slots.leaves(14)
    slots.ended(14, -9)
    records = WorkerRecords.read(tmp_path)
    assert records is not None
    assert [(it.slot, it.restarts, it.deaths) for it in records.workers] == [(1, 0, 0), (0, 2, 1)]
    slots.started(15)
    records = WorkerRecords.read(tmp_path)
    assert records is not None
    assert [(it.slot, it.restarts, it.deaths) for it in records.workers] == [(1, 0, 0), (0, 3, 1)]


def test_a_slot_that_is_taken_away_keeps_what_was_lost_in_it(slots: WorkerSlots, tmp_path: Path) -> None:
    slots.expect(1)
    slots.leaves(12)
    left_open(tmp_path, 12, 4)
    slots.ended(12, 0)
    records = WorkerRecords.read(tmp_path)
    assert records is not None
    assert (records.num_workers, records.lost_with_removed) == (1, 4)
    assert [slots.slot_of(pid) for pid in (11, 12, None)] == [0, -1, -1]
    slots.started(15)
    assert told(tmp_path)[1] == (1, 15, 1, "starting", "told to stop", 4)


def test_a_worker_that_is_added_while_another_leaves_may_have_its_slot(slots: WorkerSlots, tmp_path: Path) -> None:
    slots.leaves(12)
    slots.started(13)
    assert [row[0] for row in told(tmp_path)] == [0, 1, 1]


def test_a_folder_that_takes_no_file_stops_nobody(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "gone"):
        slots = WorkerSlots(folder)
        slots.expect(1)
        slots.started(11)
        slots.ended(11, -9)
        slots.ended(99, 0)
    assert WorkerRecords.read(tmp_path / "gone") is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"null", b'{"workers": [{"moon": 1}]}', b'{"workers": 1}']
)
def test_a_garbled_file_tells_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SLOTS_FILE).write_bytes(content)
    assert WorkerRecords.read(tmp_path) is None


@pytest.mark.parametrize(
    ("code", "words"),
    [(None, "ended"), (0, "ended with exit code 0"), (-15, "killed by SIGTERM"), (-200, "killed by signal 200")],
)
def test_an_end_is_told_in_words(code: int | None, words: str) -> None:
    assert describe_exit(code) == words
