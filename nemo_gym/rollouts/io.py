"""The JSONL files of a collection of rollouts: input rows, results and failures.

Lifecycle: `index_input` reads the input once and keeps eight bytes a row; `ResultsFile.open` takes the output's
lock; `ResultsFile.scan` cuts off a line that a killed writer left unfinished and tells which rollouts are there
already; then each result is appended with one write as soon as it exists, so a run may die at any moment and keeps
every line but the one it was writing.

Failure policy: what can't be continued safely is refused before anything runs (`DatasetError`, `UsageError`).
A bad input row is not: it is the caller's to report and pass over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import orjson

from nemo_gym.errors import DatasetError, UsageError
from nemo_gym.global_config import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME

ROW_DIGEST_KEY: Final = "_ng_row_digest"
DURATION_KEY: Final = "_ng_duration_s"

_BOM: Final = b"\xef\xbb\xbf"
_DIGEST_BYTES: Final = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputRow:
    """One line of the input that is not blank.

    Args:
        task_index: Its place among the lines that are not blank, from 0; bad lines count.
        line_number: Its place in the file, from 1.
        line: Its bytes, without surrounding white space.
    """

    task_index: int
    line_number: int
    line: bytes

    @property
    def digest(self) -> int:
        """64 bits that tell this row from any other."""
        return int.from_bytes(hashlib.blake2b(self.line, digest_size=_DIGEST_BYTES).digest(), "big")

    def parse(self) -> dict[str, Any]:
        """Return the row's JSON object.

        Raises:
            DatasetError: The line holds something else; the message leaves out file and line.
        """
        try:
            row = orjson.loads(self.line)
        except orjson.JSONDecodeError as error:
            raise DatasetError(f"invalid JSON at column {error.colno}: {error.msg}") from error
        if not isinstance(row, dict):
            raise DatasetError(f"expected a JSON object, found {_json_kind(row)}")
        return row


def read_rows(path: Path, limit: int | None = None) -> Iterator[InputRow]:
    """Yield the first `limit` rows of a JSONL file (all when None), one line in memory at a time.

    Raises:
        DatasetError: The file can't be opened or read.
    """
    try:
        with path.open("rb") as file:
            task_index = 0
            for line_number, raw in enumerate(file, start=1):
                if task_index == limit:
                    return
                line = raw.removeprefix(_BOM).strip() if line_number == 1 else raw.strip()
                if line:
                    yield InputRow(task_index, line_number, line)
                    task_index += 1
    except OSError as error:
        raise DatasetError(f"can't read {path}: {error.strerror}") from error


class RolloutSet:
    """A set of rollouts (task index, rollout index) of a run of known extent: one bit each.

    Args:
        row_digests: The digest of every row that the run covers.
        num_repeats: Rollouts per row.

    Raises:
        UsageError: They are more than memory holds bits.
    """

    def __init__(self, row_digests: array[int], num_repeats: int) -> None:
        self.row_digests = row_digests
        self.num_repeats = num_repeats
        try:
            self._bits = bytearray((self.total + 7) // 8)
        except (MemoryError, OverflowError) as error:
            raise UsageError(f"{self.total} rollouts are more than memory can keep account of") from error
        self._count = 0

    @property
    def total(self) -> int:
        """How many rollouts the run has."""
        return len(self.row_digests) * self.num_repeats

    def __len__(self) -> int:
        return self._count

    def covers(self, task_index: int, rollout_index: int) -> bool:
        """Return whether the rollout is one of the run's."""
        return 0 <= task_index < len(self.row_digests) and 0 <= rollout_index < self.num_repeats

    def __contains__(self, rollout: tuple[int, int]) -> bool:
        if not self.covers(*rollout):
            return False
        byte, bit = divmod(rollout[0] * self.num_repeats + rollout[1], 8)
        return bool(self._bits[byte] >> bit & 1)

    def add(self, task_index: int, rollout_index: int) -> None:
        """Add a rollout of the run.

        Raises:
            ValueError: The run does not cover it.
        """
        if not self.covers(task_index, rollout_index):
            raise ValueError(f"the run has no rollout {rollout_index} of row {task_index}")
        if (task_index, rollout_index) not in self:
            byte, bit = divmod(task_index * self.num_repeats + rollout_index, 8)
            self._bits[byte] |= 1 << bit
            self._count += 1


def index_input(path: Path, digests: array[int], limit: int | None = None) -> Iterator[None]:
    """Read the input once and append the digest of each of its rows to `digests`, an array of type `Q`.

    Yields:
        Nothing, once a row, so that the caller may do other things in between.

    Raises:
        DatasetError: The file can't be read or has no rows.
    """
    for row in read_rows(path, limit):
        digests.append(row.digest)
        yield
    if not digests:
        raise DatasetError(f"{path} has no rows")


class ResultsFile:
    """The output file, held under an exclusive lock (flock) while it is open.

    Open it with `ResultsFile.open`, then exhaust `scan` before the first `append`.
    """

    def __init__(self, path: Path, descriptor: int, *, is_new: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        self._is_new = is_new

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the file for appending and lock it.

        Raises:
            UsageError: Another process is writing it, it can't be opened, or it is no file that can be cut off.
        """
        try:
            is_new = not path.exists()
            if not (is_new or path.is_file()):
                raise UsageError(f"can't write {path}: not a regular file")
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UsageError(f"can't write {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise _taken(path) from None
        except OSError as error:
            # Some network file systems have no locks; results are worth more than this guard.
            logger.warning("can't lock %s (%s); make sure that nothing else writes it", path, error.strerror)
        if not _is_at(path, descriptor):
            os.close(descriptor)
            raise _taken(path)
        return cls(path, descriptor, is_new=is_new)

    @property
    def size(self) -> int:
        """The file's length in bytes."""
        return os.fstat(self._descriptor).st_size

    def clear(self) -> None:
        """Remove all results."""
        os.ftruncate(self._descriptor, 0)

    def append(self, result: dict[str, Any]) -> None:
        """Write one result as one line; on return it has left this process.

        Raises:
            orjson.JSONEncodeError: It has no form as JSON: orjson reads deeper nesting than it writes.
            OSError: It could not be written as a whole; nothing of it is left in the file.
        """
        append_line(self._descriptor, orjson.dumps(result) + b"\n")

    def scan(self, finished: RolloutSet) -> Iterator[None]:
        """Add the rollouts that the file holds to `finished`, and cut off an unfinished last line.

        Yields:
            Nothing, once a line, so that the caller may do other things in between.

        Raises:
            DatasetError: A line is no result of this run: not JSON, not of these rows, or there twice.
        """
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                whole = line.endswith(b"\n")
                if not whole and not _is_json(line):
                    os.ftruncate(self._descriptor, end)
                    return
                if line.strip():
                    self._check(line, number, finished)
                if not whole:
                    append_line(self._descriptor, b"\n")
                    return
                end += len(line)
                yield

    def remove_if_new(self) -> None:
        """Remove the file, and its folder when nothing else is in it, if `open` has made it and it is still empty."""
        if self._is_new and not self.size:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()

    def close(self) -> None:
        """Hand the lines to the disk, then release the lock."""
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, line: bytes, number: int, finished: RolloutSet) -> None:
        where = f"{self.path}, line {number}"
        try:
            task_index, rollout_index, digest = _identity(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise DatasetError(
                f"{where}: not a result of a rollout collection, so it can't be resumed; choose another output"
            ) from error
        if not finished.covers(task_index, rollout_index):
            raise DatasetError(
                f"{where}: holds rollout {rollout_index} of row {task_index}, which this run does not have "
                f"({len(finished.row_digests)} rows, {finished.num_repeats} rollouts each); "
                "resume with the input, limit and repeats it was made with, or larger ones"
            )
        if finished.row_digests[task_index] != digest:
            raise DatasetError(
                f"{where}: was made from another row {task_index} than the input has now; "
                "resume with the input it was made from"
            )
        if (task_index, rollout_index) in finished:
            raise DatasetError(f"{where}: holds rollout {rollout_index} of row {task_index} a second time")
        finished.add(task_index, rollout_index)


class FailuresFile:
    """The failures file, opened when the first failure is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, failure: dict[str, Any]) -> None:
        """Write one failure as one line.

        Raises:
            OSError: It could not be written as a whole; nothing of it is left in the file.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        append_line(self._descriptor, orjson.dumps(failure) + b"\n")

    def tidy(self, finished: RolloutSet) -> None:
        """Keep only the last failure of each rollout that is still without a result; remove an empty file."""
        self.close()
        last: dict[tuple[int, int], int] = {}
        for number, failure in enumerate(iter_failures(self.path)):
            rollout = (failure[TASK_INDEX_KEY_NAME], failure[ROLLOUT_INDEX_KEY_NAME])
            if rollout not in finished:
                last[rollout] = number
        if not last:
            self.path.unlink(missing_ok=True)
            return
        kept = set(last.values())
        temporary = self.path.with_name(self.path.name + ".new")
        with temporary.open("wb") as file:
            for number, failure in enumerate(iter_failures(self.path)):
                if number in kept:
                    file.write(orjson.dumps(failure) + b"\n")
        temporary.replace(self.path)

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def iter_results(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of a rollouts file, one in memory at a time; an unfinished last line is passed over.

    Raises:
        DatasetError: The file can't be read, or a line is no JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    result = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise DatasetError(f"{path}, line {number}: invalid JSON: {error.msg}") from error
                if not isinstance(result, dict):
                    raise DatasetError(f"{path}, line {number}: expected a JSON object")
                yield result
    except OSError as error:
        raise DatasetError(f"can't read {path}: {error.strerror}") from error


def iter_failures(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a failures file; none when it does not exist.

    Raises:
        DatasetError: As `iter_results`, and for an entry without its indices.
    """
    if not path.exists():
        return
    for failure in iter_results(path):
        if not all(isinstance(failure.get(key), int) for key in (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME)):
            raise DatasetError(f"{path}: not a failures file of a rollout collection")
        yield failure


def append_line(descriptor: int, line: bytes) -> None:
    """Write `line` at the end of a file that is open for appending: the whole of it, or nothing.

    Raises:
        OSError: It could not be written.
    """
    before = os.fstat(descriptor).st_size
    written = os.write(descriptor, line)
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def format_digest(digest: int) -> str:
    """Return a row's digest as it stands in a result: 16 hexadecimal digits."""
    return f"{digest:0{2 * _DIGEST_BYTES}x}"


def _taken(path: Path) -> UsageError:
    return UsageError(f"{path} is being written by another process; wait for it or choose another output")


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at `path`: between opening and locking its last owner may remove it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _identity(result: Any) -> tuple[int, int, int]:
    task_index, rollout_index = result[TASK_INDEX_KEY_NAME], result[ROLLOUT_INDEX_KEY_NAME]
    if type(task_index) is not int or type(rollout_index) is not int:
        raise TypeError("an index is not an integer")
    return task_index, rollout_index, int(result[ROW_DIGEST_KEY], 16)


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, list):
        return "an array"
    return "a string" if isinstance(value, str) else "a number"
