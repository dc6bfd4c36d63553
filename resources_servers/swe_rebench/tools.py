"""The tools by which an agent works in its sandbox: what they take, what they answer, and what a model is told of them.

Paths are relative to the repository. The tools reach what the sandbox's programs reach, no more and no less.
"""

import posixpath
import shlex
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.sandbox import SandboxFileError
from resources_servers.swe_rebench.patches import Repository

LISTED_FILES: Final = 1_000
_LIST_TIMEOUT_S: Final = 60.0


class ToolError(Exception):
    """Raised when a tool can't do what it was called for; the text is for the model."""


class RunCommandRequest(BaseModel):
    """The arguments of `run_command`."""

    model_config = ConfigDict(extra="forbid")

    command: str = Field(min_length=1)
    timeout_s: float | None = Field(default=None, gt=0)


class RunCommandResponse(BaseModel):
    """What came of a command; `return_code` is null where it was ended for exceeding a limit."""

    return_code: int | None
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    duration_s: float


class ReadFileRequest(BaseModel):
    """The arguments of `read_file`: lines from `start` to `end`, both included, counted from 1."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1)
    start: int | None = Field(default=None, ge=1)
    end: int | None = Field(default=None, ge=1)


class ReadFileResponse(BaseModel):
    """The lines, and how many the file has; `truncated` when not all that were asked for fit in."""

    content: str
    lines: int
    truncated: bool


class WriteFileRequest(BaseModel):
    """The arguments of `write_file`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1)
    content: str


class EditFileRequest(BaseModel):
    """The arguments of `edit_file`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1)
    old: str = Field(min_length=1)
    new: str


class DoneResponse(BaseModel):
    """The reply of a tool that only does something."""

    success: bool = True


class ListFilesRequest(BaseModel):
    """The arguments of `list_files`."""

    model_config = ConfigDict(extra="forbid")

    path: str | None = None


class ListFilesResponse(BaseModel):
    """The files below a folder; `truncated` when there are more."""

    files: list[str]
    truncated: bool


async def run_command(
    repository: Repository, request: RunCommandRequest, *, timeout_s: float, max_output_bytes: int
) -> RunCommandResponse:
    """Run a shell command in the repository."""
    done = await repository.sandbox.exec(
        request.command, cwd=repository.directory, timeout_s=timeout_s, max_output_bytes=max_output_bytes
    )
    return RunCommandResponse(**done.model_dump())


async def read_file(repository: Repository, request: ReadFileRequest, *, max_chars: int) -> ReadFileResponse:
    """Return a file's lines, as text: what is no UTF-8 is replaced."""
    data = await repository.sandbox.read(_path(repository, request.path))
    lines = _lines(data.decode("utf-8", "replace"))
    content = "".join(lines[(request.start or 1) - 1 : request.end])
    return ReadFileResponse(content=content[:max_chars], lines=len(lines), truncated=len(content) > max_chars)


async def write_file(repository: Repository, request: WriteFileRequest) -> DoneResponse:
    """Replace a file's content; makes the file and its folders where they are missing."""
    await repository.sandbox.write(_path(repository, request.path), _encoded(request.content))
    return DoneResponse()


async def edit_file(repository: Repository, request: EditFileRequest) -> DoneResponse:
    """Replace a text that a file holds exactly once."""
    path = _path(repository, request.path)
    data = await repository.sandbox.read(path)
    old = _encoded(request.old)
    count = data.count(old)
    if count != 1:
        found = "does not hold the old text" if count == 0 else f"holds the old text {count} times"
        raise ToolError(f"{request.path} {found}; it has to be there exactly once")
    await repository.sandbox.write(path, data.replace(old, _encoded(request.new)))
    return DoneResponse()


async def list_files(repository: Repository, request: ListFilesRequest) -> ListFilesResponse:
    """Return the files below a folder, without those of `.git`."""
    folder = posixpath.normpath(request.path or ".")
    # An absolute path or one with "./" can't be taken for an option of find.
    start = folder if folder.startswith("/") else f"./{folder}" if folder != "." else "."
    done = await repository.sandbox.exec(
        f"find {shlex.quote(start)} -name .git -prune -o '(' -type f -o -type l ')' -print"
        f" | LC_ALL=C sort | head -n {LISTED_FILES + 1}",
        cwd=repository.directory,
        timeout_s=_LIST_TIMEOUT_S,
    )
    if done.stderr and not done.stdout:
        raise SandboxFileError(done.stderr.strip())
    files = [name.removeprefix("./") for name in done.stdout.split("\n") if name]
    return ListFilesResponse(files=files[:LISTED_FILES], truncated=done.truncated or len(files) > LISTED_FILES)


def _lines(text: str) -> list[str]:
    """Split as `grep -n` and `sed` count; `splitlines` would also split at form feeds and the like."""
    *whole, last = text.split("\n")
    return [f"{line}\n" for line in whole] + ([last] if last else [])


def _path(repository: Repository, path: str) -> str:
    if "\0" in path:
        raise ToolError("a path can't hold a NUL character")
    return posixpath.join(repository.directory, path)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolError(f"the text can't be written as UTF-8: {error.reason}") from error


def _tool(name: str, description: str, properties: dict[str, dict[str, Any]], required: list[str]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
        "strict": False,
    }


_PATH: Final = {"type": "string", "description": "The file's path, relative to the repository."}

TOOLS: Final = [
    _tool(
        "run_command",
        "Run a shell command in the repository and read what it prints.",
        {
            "command": {"type": "string", "description": "The command line."},
            "timeout_s": {"type": "number", "description": "Seconds after which it is ended."},
        },
        ["command"],
    ),
    _tool(
        "read_file",
        "Read a file, or some of its lines.",
        {
            "path": _PATH,
            "start": {"type": "integer", "description": "The first line, counted from 1."},
            "end": {"type": "integer", "description": "The last line."},
        },
        ["path"],
    ),
    _tool(
        "write_file",
        "Write a file: make it, or replace all it holds.",
        {"path": _PATH, "content": {"type": "string", "description": "What it is to hold."}},
        ["path", "content"],
    ),
    _tool(
        "edit_file",
        "Replace a text in a file. The old text has to be there exactly once.",
        {
            "path": _PATH,
            "old": {"type": "string", "description": "The text to replace."},
            "new": {"type": "string", "description": "The text to put in its place."},
        },
        ["path", "old", "new"],
    ),
    _tool(
        "list_files",
        "List the files of the repository, or of one folder.",
        {"path": {"type": "string", "description": "The folder's path, relative to the repository."}},
        [],
    ),
]
"""What a row offers to the model."""
