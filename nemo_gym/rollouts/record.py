"""What a collection's files are called, and the record of what its output was made from and with."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.errors import DatasetError, NemoGymError, UsageError


@dataclass(frozen=True)
class RolloutFiles:
    """The paths of one collection, all named after its output file."""

    output: Path

    @property
    def failures(self) -> Path:
        """Rollouts that have no result, one JSON line each, with their reason."""
        return self._beside("_failures.jsonl")

    @property
    def run_record(self) -> Path:
        """What the output was made from and with."""
        return self._beside("_run.json")

    @property
    def metrics(self) -> Path:
        """The metrics of the output, written by whoever profiles it."""
        return self._beside("_metrics.json")

    def remove_outcomes(self) -> None:
        """Remove the failures and the metrics of an earlier run.

        Raises:
            NemoGymError: One of them can't be removed.
        """
        for path in (self.failures, self.metrics):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise NemoGymError(f"can't remove {path}: {error.strerror}") from error

    def _beside(self, ending: str) -> Path:
        return self.output.with_name(self.output.stem + ending)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, replacing an older one at once; a failure leaves the older one as it was.

    Raises:
        NemoGymError: It can't be written.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise NemoGymError(f"can't write {path}: {error.strerror}") from error


@dataclass(frozen=True)
class RunRecord:
    """What an output was made from and with; kept beside it as `<output stem>_run.json`.

    Args:
        input: Absolute path of the input, for the reader: rows are told apart by their digests.
        agent: The agent that was asked for, or None where each row names its own.
        responses_create_params: What was put over every row's own parameters.
        settings: Whatever else must be the same for results to belong together, as the caller defines it.
        num_repeats: Rollouts per row.
        limit: How many rows were asked for, or None for all.
        started_at: When the first run began, ISO 8601 in UTC.
        nemo_gym_version: The version that began it.
    """

    input: str
    agent: str | None
    responses_create_params: dict[str, Any]
    settings: dict[str, Any]
    num_repeats: int
    limit: int | None
    started_at: str
    nemo_gym_version: str

    @classmethod
    def load(cls, path: Path) -> RunRecord | None:
        """Return the record at `path`, or None where there is none.

        Raises:
            DatasetError: The file is no such record.
        """
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, TypeError, ValueError) as error:
            raise DatasetError(f"{path}: not the record of a rollout collection") from error

    def save(self, path: Path) -> None:
        """Write the record, replacing an older one at once.

        Raises:
            NemoGymError: It can't be written.
        """
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=2).encode() + b"\n")

    def check_same_run(self, asked: RunRecord, output: Path) -> None:
        """Check that results of the run that is asked for may join those of this one.

        Raises:
            UsageError: They may not; the message names the first setting that differs.
        """
        pairs: dict[str, tuple[Any, Any]] = {
            "agent": (self.agent, asked.agent),
            "responses_create_params": (self.responses_create_params, asked.responses_create_params),
        }
        for key in sorted(self.settings.keys() | asked.settings.keys()):
            pairs[key] = (self.settings.get(key), asked.settings.get(key))
        for name, (before, now) in pairs.items():
            if before != now:
                raise UsageError(
                    f"{output} was made with {name} {json.dumps(before)}, and this run has {json.dumps(now)}; "
                    "resume with the same, choose another output, or overwrite it"
                )
