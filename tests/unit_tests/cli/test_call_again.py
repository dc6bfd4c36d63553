from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import pytest
import typer

from nemo_gym.cli.call_again import call_again
from nemo_gym.logs.redaction import Redactor

CHANGES = {"resume": True, "overwrite": False, "output": "my results.jsonl"}


def again(*words: str) -> str:
    app = typer.Typer()
    told: list[str] = []

    @app.callback()
    def root() -> None:
        pass

    @app.command()
    def run(
        context: typer.Context,
        overrides: Annotated[list[str] | None, typer.Argument()] = None,
        config: Annotated[list[str] | None, typer.Option("--config", "-c")] = None,
        output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
        limit: Annotated[int, typer.Option("--limit")] = 8,
        resume: Annotated[bool, typer.Option("--resume")] = False,
        overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
    ) -> None:
        told.append(call_again(context, CHANGES, Redactor({"hidden-value"})))

    with pytest.raises(SystemExit) as end:
        typer.main.get_command(app).main(["run", *words], prog_name="gym")
    assert end.value.code == 0
    return told[0]


def test_what_was_not_given_is_left_out_and_the_changes_are_in() -> None:
    assert again() == "gym run --output 'my results.jsonl' --resume"


def test_what_was_given_stays_quoted_for_a_shell() -> None:
    line = again("-c", "a.yaml", "x=1 2", "-o", "old.jsonl", "--limit", "8", "--config", "b c.yaml", "--overwrite")
    assert line == "gym run --config a.yaml --config 'b c.yaml' --output 'my results.jsonl' --limit 8 --resume 'x=1 2'"


def test_a_secret_is_not_shown() -> None:
    line = again("policy_api_key=sk-123", "a.b.password=p", "token=t", "tokens=5")
    assert line.endswith("--resume policy_api_key=... a.b.password=... token=... tokens=5")


def test_a_secret_within_other_words_is_not_shown() -> None:
    line = again("model={api_key: hidden-value, name: m}", "url=https://me:pass@host/", "header=Bearer abcdef123456")
    assert not any(secret in line for secret in ("hidden-value", "me:pass", "abcdef123456"))
    assert "name: m" in line


def test_a_shell_reads_the_line_as_it_was_written() -> None:
    words = ["a=it's; rm -rf $HOME", 'b="q" `x`', "c=\u00fc\u2028 #1", "d=line\nline", "e=~/*"]
    assert shlex.split(again(*words))[-len(words) :] == words
