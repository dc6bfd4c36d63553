r"""Commands in a container: the two shell scripts that run there, and what is made of a command's output.

The Engine API starts commands but can't end them, and does not say that one has ended while something that it left in
the background holds its output. So two scripts for /bin/sh (POSIX, builtins only) run in the container:

- `MAIN`, its main process, reads orders from its standard input: signal everything that belongs to one command. It
  finds a command's processes by their session and by a variable in their environment. It is made for a container, that
  is for process numbers of its own. At the end of its input, which is the end of the worker, it ends, and the container
  with it.
- `WRAPPER`, around each command, tells the process number at the beginning of standard output, and at the end of both
  outputs the exit code.

What the scripts say is known by marks that come in on their standard input: no command line and no environment shows
them, so a command can't forge its end with what it reads there. A program of the same user that goes further (reads
the wrapper's memory where the kernel lets it, or leaves something behind that empties the pipe of the output) can: it
gains a wrong result of a command of its own sandbox.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Final

from nemo_gym.sandbox.docker.engine import STDOUT, SYSTEM_ERROR, EngineError, Stream
from nemo_gym.sandbox.providers.base import ExecRequest
from nemo_gym.sandbox.spec import SandboxExecResult
from nemo_gym.sandbox.supervision.command import Output

MARK_VARIABLE: Final = "NEMO_GYM_SANDBOX_COMMAND"
SHELL: Final = "/bin/sh"
MAX_LINE: Final = 4096
SIGKILLED: Final = 137

MAIN: Final = r"""
hit() {
  n=0
  if [ "$signal" = KILL ] && [ "$leader" -gt 1 ]; then kill -KILL "-$leader"; fi
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    if [ "$pid" = 1 ] || [ "$pid" = "$$" ]; then continue; fi
    read -r stat <"$folder/stat" || continue
    set -- ${stat##*) }
    case $1 in Z | X) continue ;; esac
    if [ "$leader" -le 1 ] || [ "$4" != "$leader" ]; then
      found=
      while read -r line || [ -n "$line" ]; do
        case $line in *"$mark"*) found=1 ;; esac
      done <"$folder/environ"
      [ -n "$found" ] || continue
    fi
    kill "-$signal" "$pid" && n=$((n + 1))
  done
}
printf 'ready %s %s\n' "$(id -u)" "$(id -g)"
while read -r order signal leader mark; do
  [ -n "$mark" ] || continue
  rounds=0 n=1
  while [ "$n" -gt 0 ] && [ "$rounds" -lt 100 ]; do
    hit 2>/dev/null
    rounds=$((rounds + 1))
    [ "$signal" = KILL ] || break
  done
  printf 'done %s %s\n' "$order" "$n"
done
"""

WRAPPER: Final = r"""
_sandbox_kind=$1 _sandbox_cwd=$2
shift 2
read -r _sandbox_head _sandbox_mark || exit 126
_sandbox_ooms() {
  _sandbox_n=0
  while read -r _sandbox_key _sandbox_value; do
    if [ "$_sandbox_key" = oom_kill ]; then _sandbox_n=$_sandbox_value; fi
  done </sys/fs/cgroup/memory.events
}
trap : HUP INT TERM
exec 3>&2 2>/dev/null # what this shell itself has to say is not the command's
printf '\001%s %s\n' "$_sandbox_head" "$$"
_sandbox_ooms
_sandbox_before=$_sandbox_n
if cd "$_sandbox_cwd"; then
  if [ "$_sandbox_kind" = line ]; then
    if [ -x /bin/bash ]; then set -- /bin/bash -c "$1"; else set -- /bin/sh -c "$1"; fi
  fi
  (exec "$@" 2>&3 3>&-)
  _sandbox_code=$?
else
  printf 'sandbox: %s: no such folder, or not for this user\n' "$_sandbox_cwd" >&3
  _sandbox_code=126
fi
_sandbox_ooms
printf '\001%s %s %s\n' "$_sandbox_mark" "$_sandbox_code" "$((_sandbox_n - _sandbox_before))"
printf '\001%s\n' "$_sandbox_mark" >&3
"""


class MarkedOutput:
    """One output of a command, kept within bounds up to the mark; what comes after the marked line is dropped.

    Args:
        mark: What begins the line that the wrapper writes.
        limit: Bytes to keep.
    """

    def __init__(self, mark: bytes, limit: int) -> None:
        self.kept = Output(limit)
        self.line: bytes | None = None
        self._mark, self._held = mark, b""

    def add(self, data: bytes) -> None:
        """Take more of it."""
        if self.line is not None:
            return
        self._held += data
        start = self._held.find(self._mark)
        if start < 0:
            keep = len(self._mark) - 1
            self.kept.add(self._held[:-keep])
            self._held = self._held[-keep:]
            return
        newline = self._held.find(b"\n", start)
        if newline >= 0 or len(self._held) > start + MAX_LINE:
            self.kept.add(self._held[:start])
            self.line = self._held[start + len(self._mark) : newline]
            self._held = b""

    def text(self) -> str:
        """Return what is kept."""
        if self.line is None:
            self.kept.add(self._held)
            self._held = b""
        return self.kept.text().decode(errors="replace")


class Command:
    """One command, from the call to its result.

    Attributes:
        started: Set when its process number is known, or never will be.
        exited: Set when it has ended, or nothing more will be heard of it, or nobody waits for it.
        closed: Set when all its output is there.
        leader: The number of the wrapper's process, which leads its session; 0 when it did not start.
        mark: What its processes have in their environment.
        cancelled: Whether nobody waits for it.
        timed_out: Whether it ran out of time.
        problem: Why nothing more will be heard of it.
    """

    def __init__(self, max_output: int) -> None:
        self.started, self.exited, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.leader = 0
        self.mark = secrets.token_hex(8)
        # Two: the first stands in the output while the command runs.
        self._head_mark, self._end_mark = secrets.token_hex(8), secrets.token_hex(8)
        self.cancelled = self.timed_out = False
        self.problem: EngineError | None = None
        self._began = self._ended = 0.0
        self._head: bytes = b""
        mark = b"\x01" + self._end_mark.encode()
        self._out, self._err = MarkedOutput(mark, max_output), MarkedOutput(mark, max_output)

    def arguments(self, request: ExecRequest, cwd: str) -> list[str]:
        """Return the program and its arguments that the daemon starts."""
        is_line = isinstance(request.command, str)
        argv = [request.command] if isinstance(request.command, str) else list(request.command)
        return [SHELL, "-c", WRAPPER, "sandbox", "line" if is_line else "list", cwd, *argv]

    def standard_input(self, request: ExecRequest) -> bytes:
        """Return what the wrapper reads, and after it the command."""
        return f"{self._head_mark} {self._end_mark}\n".encode() + (request.stdin or b"")

    def variable(self) -> str:
        """Return the variable by which its processes are found."""
        return f"{MARK_VARIABLE}={self.mark}"

    async def follow(self, stream: Stream) -> None:
        """Take the output of the stream to its end."""
        try:
            async for kind, data in stream.frames():
                self._take(kind, data)
        except EngineError as error:
            self.problem = error
        finally:
            self.lose()
            self.closed.set()

    def lose(self) -> None:
        """Note that nothing more will be heard of it."""
        self.started.set()
        self._exit()

    def cancel(self) -> None:
        """Note that nobody waits for it any more."""
        self.cancelled = True
        self.exited.set()

    @property
    def reported(self) -> bool:
        """Whether its wrapper has told how it ended."""
        return self._out.line is not None

    def _exit(self) -> None:
        self._ended = self._ended or time.monotonic()
        self.exited.set()

    def _take(self, kind: int, data: bytes) -> None:
        if kind == SYSTEM_ERROR:
            self.problem = EngineError(f"the Docker daemon says of the command: {data[:1000].decode(errors='replace')}")
        elif kind != STDOUT:
            self._err.add(data)
        elif not self.leader:
            self._take_head(data)
        else:
            self._out.add(data)
        if self.reported:
            self._exit()
            if self._err.line is not None:
                self.closed.set()

    def _take_head(self, data: bytes) -> None:
        self._head = (self._head + data)[: MAX_LINE + len(data)]
        line, newline, rest = self._head.partition(b"\n")
        number = line.removeprefix(b"\x01" + self._head_mark.encode() + b" ")
        if newline and number != line and number.isdigit():
            self.leader, self._head = int(number), b""
            self._began = time.monotonic()
            self.started.set()
            self._out.add(rest)

    def result(self) -> SandboxExecResult:
        """Return what came of it."""
        stdout, stderr = self._out.text(), self._err.text()
        code, oom_kills = None, 0
        if not self.leader:
            said = " ".join(f"{self._head.decode(errors='replace')} {stderr}".split())
            stderr = f"sandbox: no command could be started: {said or 'the daemon does not say why'}\n"
        elif self._out.line is not None:
            numbers = self._out.line.split()
            if len(numbers) == 2 and all(number.isdigit() for number in numbers):
                code, oom_kills = int(numbers[0]), int(numbers[1])
        elif not self.timed_out:
            stderr += "sandbox: the command killed its own supervisor\n"
        if code == SIGKILLED and oom_kills:
            code = None
            stderr += "\nsandbox: killed for using more memory than its limit\n"
        ended = self._ended or time.monotonic()
        return SandboxExecResult(
            return_code=None if self.timed_out else code,
            stdout=stdout,
            stderr=stderr,
            timed_out=self.timed_out,
            truncated=self._out.kept.cut or self._err.kept.cut,
            duration_s=ended - self._began if self._began else 0.0,
        )
