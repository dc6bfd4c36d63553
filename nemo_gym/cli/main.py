"""The console entry `gym`: the root command, and the one place where errors become text and exit codes."""

from __future__ import annotations

import io
import platform
import sys
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

import nemo_gym
from nemo_gym.cli.lazy import LazyGroup
from nemo_gym.cli.output import show_error, write_json, write_line
from nemo_gym.errors import Interrupted, NemoGymError
from nemo_gym.paths import PARENT_DIR, state_dir

EPILOG = """\
Examples:

gym eval run --resources-server example_session_state_mgmt

gym env init --resources-server my_environment

gym env start --resources-server my_environment --model-type openai_model policy_base_url=http://localhost:8000/v1

Exit codes: 0 done, 1 the work failed, 2 the call or its input was wrong, 130 stopped by Ctrl-C.
"""

app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@dataclass
class Session:
    """What the root command's options say, for the code around it.

    Args:
        debug: Whether to show the traceback of an unexpected error.
    """

    debug: bool = False


@app.callback(epilog=EPILOG)
def root(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")] = False,
) -> None:
    """Reinforcement-learning environments as HTTP servers: run them, score models on them, build new ones."""
    if isinstance(ctx.obj, Session):
        ctx.obj.debug = debug


@app.command()
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the version of nemo_gym and what it runs on."""
    facts = {
        "nemo_gym": nemo_gym.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "location": str(PARENT_DIR),
    }
    if as_json:
        write_json(facts)
    else:
        for name, value in facts.items():
            write_line(f"{name} {value}")


def main() -> None:
    """Run `gym` with the arguments of the process, and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file's name may be no text; `\\udcff` is also how JSON writes such a byte.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run `gym` with `arguments` and return its exit code; no error leaves it."""
    session = Session()
    try:
        typer.main.get_command(app).main(arguments, prog_name="gym", obj=session)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except Interrupted as interrupted:
        return 128 + interrupted.signum
    except NemoGymError as error:
        show_error(str(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the outermost boundary of the program
        _show_unexpected(error, session)
    return 1


def _show_unexpected(error: Exception, session: Session) -> None:
    text = traceback.format_exc()
    if session.debug:
        show_error(text)
        return
    summary = f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    try:
        where = f"Traceback: {_save_traceback(text)} (or run again with `gym --debug ...`)"
    except (OSError, RuntimeError):  # a RuntimeError when there is no home directory
        where = "Run again with `gym --debug ...` to see where it happened."
    show_error(f"{summary}\n{where}")


def _save_traceback(text: str) -> Path:
    folder = state_dir() / "tracebacks"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.txt"
    path.write_text(text, encoding="utf-8")
    return path
