"""Write `data/example.jsonl`: one row for each repository of `sources/`.

    python create_examples.py            write the file
    python create_examples.py --check    exit with 1 if the file is not what would be written

It builds the repositories, as their commits are part of the rows.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from resources_servers.swe_rebench.prepare_rows import create_params
from resources_servers.swe_rebench.repositories import (
    ExampleRepository,
    build_repository,
    example_repositories,
)
from resources_servers.swe_rebench.rows import SweRebenchRow

OUTPUT: Final = Path(__file__).parent / "data" / "example.jsonl"


def row_of(repository: ExampleRepository, base_commit: str) -> dict[str, Any]:
    """Return a repository's row."""
    settings = repository.settings
    statement = settings["problem_statement"]
    repo = f"example/{repository.name}"
    install_config = {key: settings[key] for key in ("install", "test_cmd", "log_parser")}
    if "test_timeout_s" in settings:
        install_config["test_timeout_s"] = settings["test_timeout_s"]
    row = {
        "instance_id": f"example__{repository.name}-1",
        "responses_create_params": create_params(repo, statement),
        "repo": repo,
        "base_commit": base_commit,
        "image_name": repository.image_name,
        "patch": repository.patch,
        "test_patch": repository.test_patch,
        "problem_statement": statement,
        "install_config": install_config,
        "FAIL_TO_PASS": settings["FAIL_TO_PASS"],
        "PASS_TO_PASS": settings["PASS_TO_PASS"],
        "golden_patch_resolves": settings.get("golden_patch_resolves", True),
    }
    SweRebenchRow.model_validate(row)
    return row


def rows() -> list[dict[str, Any]]:
    """Return all rows."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            row_of(repository, build_repository(repository, Path(folder) / repository.name))
            for repository in example_repositories()
        ]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the file is not what would be written")
    check = parser.parse_args(arguments).check
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())
    if check:
        return 0 if OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == text else 1
    OUTPUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
