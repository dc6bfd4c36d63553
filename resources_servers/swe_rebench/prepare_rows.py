"""Turn rows of the public SWE-rebench-V2 dataset into rows that can be run: with a prompt and the tools.

    python -m resources_servers.swe_rebench.prepare_rows IN.jsonl OUT.jsonl

Both are JSON Lines; other formats have converters of their own. The prompt is made from `repo` and
`problem_statement`. All other fields stay as they are; a row that has `responses_create_params` is kept whole.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from nemo_gym.errors import NemoGymError
from resources_servers.swe_rebench.rows import SweRebenchRow
from resources_servers.swe_rebench.tools import TOOLS

INTRODUCTION: Final = """\
The working directory holds the repository {repo}. Repair it as described below, with the tools. Your work is judged by
tests that you don't see, on the files as you leave them; it need not be committed.

"""

logger = logging.getLogger(__name__)


class RowsError(NemoGymError):
    """Raised when a file of rows can't be turned into one that can be run."""


def create_params(repo: str, problem_statement: str) -> dict[str, Any]:
    """Return what a model is asked: the prompt and the tools."""
    return {
        "input": [{"role": "user", "content": INTRODUCTION.format(repo=repo) + problem_statement}],
        "tools": TOOLS,
        "parallel_tool_calls": False,
    }


def prepared(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row that can be run.

    Raises:
        RowsError: It lacks fields that judging needs, or says nothing about the task.
    """
    try:
        task = SweRebenchRow.model_validate(row)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, it['loc']))}: {it['msg']}" for it in error.errors())
        raise RowsError(f"{row.get('instance_id', 'a row without instance_id')} can't be judged: {found}") from error
    if "responses_create_params" in row:
        return dict(row)
    if not task.problem_statement.strip():
        raise RowsError(f"{task.instance_id} has no problem_statement, so there is nothing to ask a model")
    return {**row, "responses_create_params": create_params(task.repo, task.problem_statement)}


def main(arguments: list[str] | None = None) -> int:
    """Convert a file; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="the dataset's rows, as JSON Lines")
    parser.add_argument("target", type=Path, help="the file to write")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        lines = [json.dumps(prepared(row)) for row in _rows_of(parsed.source)]
        parsed.target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except (RowsError, OSError) as error:
        logger.error("%s", error)  # noqa: TRY400 - its text says all
        return 1
    logger.info("%d rows written to %s", len(lines), parsed.target)
    return 0


def _rows_of(source: Path) -> Iterator[dict[str, Any]]:
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RowsError(f"{source}, line {number}: no JSON: {error}") from error
            if not isinstance(row, dict):
                raise RowsError(f"{source}, line {number}: expected an object, not {line.strip()[:80]}")
            yield row


if __name__ == "__main__":
    sys.exit(main())
