"""The repository in a sandbox: prepared for an agent, its changes taken out as a patch, a patch put in.

**Preparing.** The image's repository is set to the base commit, and its `.git` replaced by a new one that holds the
base commit and what came before it, and no other object: no later commit, branch, tag, stash, reflog, hook or remote.
The tree of all files that then lie there, of those too that git does not track, is the *baseline*.

**What counts as the agent's patch.** The difference between the baseline and the files as the agent leaves them; what
it committed or staged makes no difference. Of this,

- files that the repository ignores (build products, caches) are left out, unless the agent added them to the index,
- files that the test patch owns are as in the baseline; a patch that changes them nevertheless is refused,
- nested repositories that the image brought, submodules among them, are left out with all they hold; of those that
  the agent made, the files count as any others,
- what is no file and no symbolic link (a socket, a pipe, an empty folder) has no place in git and is left out.

Files are taken byte by byte: the agent's `.gitattributes` convert nothing.

**Whose code runs.** Only programs of the sandbox, in the sandbox; this machine's git never sees the agent's files.
There, too, git works in a directory of its own outside of the repository, so that no hook, filter, alias, monitor or
setting of the agent's takes effect, and a damaged or removed `.git` does no harm: all it is asked for are objects of
the baseline, and where it has them no longer, a fresh sandbox has. The agent may still replace the sandbox's
programs. What comes out is data that the agent controls, as its files are: read up to a limit, and applied in another
sandbox.

Scripts reach the shell through its standard input, as an argument could not hold long lists of paths.
"""

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from nemo_gym.errors import NemoGymError
from nemo_gym.sandbox import AsyncSandbox, SandboxExecResult
from resources_servers.swe_rebench import git_scripts
from resources_servers.swe_rebench.patch_paths import patch_paths

GIT_TIMEOUT_S: Final = 300.0
EXTRACT_TIMEOUT_S: Final = 60.0
"""Shorter, as the agent can make it last."""

_TREE_BYTES: Final = 512 * 2**20
_SHOWN: Final = 1_000
_OBJECT_NAME: Final = re.compile(r"[0-9a-f]{40,64}")
_SIGNALS: Final = 128
_TROUBLE: Final = re.compile(
    r"no space left|out of diskspace|file system full|quota exceeded|cannot allocate memory"
    r"|out of memory|memory exhausted|malloc failed|unable to mmap|too many open files|resource temporarily unavailable"
    r"|cannot fork|unable to (?:fork|create thread)|input/output error|read-only file system|stale file handle"
    r"|terminated by signal|\bkilled$|segmentation fault$|bus error$",
    re.IGNORECASE | re.MULTILINE,
)
"""What programs say when the machine is at fault and not the files; all scripts run with LC_ALL=C."""

_GLOB: Final = re.compile(rb"([*?\[\]\\])")


class RepositoryError(NemoGymError):
    """Raised when the repository of a sandbox can't be worked with.

    Args:
        problem: What failed.
        of_the_machine: Whether it may be the machine's trouble, which says nothing about the repository: no time, space
            or memory was left, or git was killed.
    """

    def __init__(self, problem: str, *, of_the_machine: bool = False) -> None:
        self.of_the_machine = of_the_machine
        super().__init__(problem)


class PatchTooLargeError(RepositoryError):
    """Raised when an agent's changes are larger than the limit."""


class OwnedFilesError(RepositoryError):
    """Raised when a patch changes files of the tests. Reading changes leaves those out, so something forged it."""


class BaselineLostError(RepositoryError):
    """Raised when the agent's `.git` no longer has the objects of the baseline."""


@dataclass(frozen=True, slots=True)
class Repository:
    """The repository of a running sandbox.

    Args:
        sandbox: The sandbox.
        directory: Where the repository is in it.
        base_commit: The full name of the base commit.
        baseline: The tree of the files that the agent starts from.
        may_skip: Whether the image has files that git can't add, so that the agent's sandbox may have them too.
        nested: Nested repositories that the image brought, by their paths from `directory`.
        ignored: The repository's own list of ignored files that is no part of its files (`info/exclude`).
    """

    sandbox: AsyncSandbox
    directory: str
    base_commit: str
    baseline: str
    may_skip: bool = False
    nested: tuple[bytes, ...] = ()
    ignored: bytes = b""

    @classmethod
    async def prepare(cls, sandbox: AsyncSandbox, directory: str, base_commit: str) -> Self:
        """Set the repository in a fresh sandbox to its base commit, and put its later history out of reach.

        Raises:
            RepositoryError: There is no repository, or it has no such commit.
        """
        repository = _word(directory.encode())
        words = {b"REPOSITORY": repository, b"BASE": _word(base_commit.encode())}
        done = await _run(sandbox, git_scripts.PREPARE, words)
        what = f"the repository in {directory} could not be set to its base commit {base_commit}"
        _check(done, what)
        try:
            commit, encoded_nested, encoded_ignored = done.stdout.split("\n")[:3]
            nested = tuple(
                path.removeprefix(b"./").removesuffix(b"/.git")
                for path in base64.b64decode(encoded_nested).split(b"\0")
                if path
            )
            ignored = base64.b64decode(encoded_ignored)
        except ValueError as error:
            raise RepositoryError(f"{what}: unexpected output {done.stdout[:_SHOWN]!r}") from error
        words[b"EXCLUDED"] = _excluded(nested)
        done = await _run(sandbox, git_scripts.BASELINE, words)
        _check(done, what)
        baseline, _, skipped = done.stdout.strip().partition("\n")
        if not _OBJECT_NAME.fullmatch(baseline):
            raise RepositoryError(f"{what}: unexpected output {done.stdout[:_SHOWN]!r}")
        return cls(sandbox, directory, commit, baseline, bool(skipped), nested, ignored)

    async def extract_patch(self, owned: Iterable[bytes], max_bytes: int, pristine: Self | None = None) -> bytes:
        """Return the agent's changes as a patch; afterwards the sandbox should be stopped.

        Args:
            owned: Paths whose changes don't count.
            max_bytes: The largest patch.
            pristine: The repository in a fresh sandbox, which gives the baseline's objects in place of the agent's
                `.git`.

        Raises:
            BaselineLostError: The agent's `.git` does not have the objects; `pristine` is needed.
            PatchTooLargeError: The patch is larger than `max_bytes`.
            OwnedFilesError: The patch changes owned paths nevertheless.
            RepositoryError: It failed otherwise, ran out of time, or left files out that it could not read.
        """
        pack = "" if pristine is None else await self._take_pack(await pristine.pack_baseline())
        baseline = self.baseline if pristine is None else pristine.baseline
        paths = sorted(owned)
        reset = git_scripts.RESET_OWNED.replace(b"@OWNED@", _words(paths)) if paths else b""
        words = {
            b"REPOSITORY": _word(self.directory.encode()),
            b"TREE": baseline.encode(),
            b"OBJECTS": _word(pack.encode()),
            b"INFO_EXCLUDE": _word(self.ignored),
            b"NESTED": b"".join(b"-path %s -prune -o " % _word(_GLOB.sub(rb"\\\1", b"./" + it)) for it in self.nested),
            b"EXCLUDED": _excluded(self.nested),
            b"MAY_SKIP": b"yes" if self.may_skip else b"no",
            b"RESET_OWNED": reset,
            b"LIMIT": str(max_bytes).encode(),
        }
        # base64 makes four letters and a bit of three bytes.
        done = await _run(
            self.sandbox,
            git_scripts.EXTRACT,
            words,
            max_output_bytes=max_bytes * 3 // 2 + 10_000,
            timeout_s=EXTRACT_TIMEOUT_S,
        )
        _check_machine(done, "the changes could not be read", EXTRACT_TIMEOUT_S)
        if done.return_code == git_scripts.EXIT_SKIPPED:
            raise RepositoryError(f"some files could not be read: {_end(done.stderr)}", of_the_machine=True)
        if done.return_code == git_scripts.EXIT_TOO_LARGE:
            raise PatchTooLargeError(f"the patch is {done.stdout.strip()[:20]} bytes long; the limit is {max_bytes}")
        if done.return_code == git_scripts.EXIT_NO_OBJECTS:
            raise BaselineLostError(f"the agent's .git lacks the baseline: {_end(done.stderr)}")
        _check(done, "the changes could not be read")
        size, _, encoded = done.stdout.partition("\n")
        patch = _decoded(encoded)
        if str(len(patch)) != size:
            raise RepositoryError(
                f"the changes could not be read: {len(patch)} bytes came, {size[:20]!r} were announced"
            )
        # Programs that the agent left running may have changed it on its way.
        if touched := meeting_paths(patch_paths(patch), paths):
            names = ", ".join(path.decode("utf-8", "replace") for path in touched[:10])
            raise OwnedFilesError(f"the patch changes files of the tests: {names}")
        return patch

    async def pack_baseline(self) -> bytes:
        """Return the objects of the baseline as a pack."""
        words = {b"REPOSITORY": _word(self.directory.encode()), b"TREE": self.baseline.encode()}
        done = await _run(self.sandbox, git_scripts.PACK_TREE, words, max_output_bytes=_TREE_BYTES)
        _check(done, "the baseline could not be packed")
        return _decoded(done.stdout)

    async def apply(self, patch: bytes, *, exactly: bool = False, backwards: bool = False) -> str | None:
        """Apply a patch to the files, wholly or not at all; return None, or why it does not apply.

        Args:
            patch: The patch.
            exactly: Whether it was taken by `extract_patch`, which reads files byte by byte. Others are written by the
                repository's `.gitattributes`.
            backwards: Whether to take it out again.

        Raises:
            RepositoryError: The machine was at fault.
        """
        if not patch.strip():
            return None
        attributes = git_scripts.EXACT_ATTRIBUTES if exactly else ""
        options = ["-R"] if backwards else []
        done = await self.sandbox.exec(
            ["sh", "-c", git_scripts.APPLY, "sh", self.directory, attributes, *options],
            stdin=patch,
            timeout_s=GIT_TIMEOUT_S,
        )
        if done.ok:
            return None
        _check_machine(done, "a patch could not be applied")
        return _end(done.stderr) or f"git apply ended with {done.return_code}"

    async def keep_files(self, paths: Iterable[bytes]) -> str:
        """Copy files aside, for `put_files`; return where they are."""
        listed = _words(sorted(paths))
        if not listed:
            return ""
        words = {b"REPOSITORY": _word(self.directory.encode()), b"OWNED": listed}
        done = await _run(self.sandbox, git_scripts.KEEP_OWNED, words)
        _check(done, "the files of the tests could not be kept")
        return done.stdout.removesuffix("\n")

    async def put_files(self, paths: Iterable[bytes], kept: str) -> None:
        """Make files what `keep_files` kept, whatever is in their place; those that it did not find are removed."""
        listed = _words(sorted(paths))
        if not listed:
            return
        words = {b"REPOSITORY": _word(self.directory.encode()), b"OWNED": listed, b"KEPT": _word(kept.encode())}
        done = await _run(self.sandbox, git_scripts.PUT_OWNED, words)
        _check(done, "the files of the tests could not be put in their place")

    async def _take_pack(self, pack: bytes) -> str:
        done = await self.sandbox.exec(
            ["sh", "-c", git_scripts.TAKE_PACK], stdin=base64.b64encode(pack), timeout_s=EXTRACT_TIMEOUT_S
        )
        _check(done, "the baseline could not be brought back", EXTRACT_TIMEOUT_S)
        return done.stdout.strip()


async def _run(
    sandbox: AsyncSandbox,
    script: bytes,
    words: dict[bytes, bytes],
    max_output_bytes: int = 1_000_000,
    timeout_s: float = GIT_TIMEOUT_S,
) -> SandboxExecResult:
    text = git_scripts.PRELUDE + script
    words = {b"EXACT": _word(git_scripts.EXACT_ATTRIBUTES.encode()), **words}
    # In one pass: what is put in may itself look like a place.
    text = re.sub(rb"@([A-Z_]+)@", lambda place: words[place[1]], text)
    return await sandbox.exec(["sh", "-s"], stdin=text, timeout_s=timeout_s, max_output_bytes=max_output_bytes)


def meeting_paths(paths: Iterable[bytes], owned: Iterable[bytes]) -> list[bytes]:
    """Return those of the paths that are owned, lie below an owned one, or are a folder of one."""
    owned = set(owned)
    folders = {b"/".join(parts[:n]) for parts in (path.split(b"/") for path in owned) for n in range(1, len(parts))}

    def meets(path: bytes) -> bool:
        parts = path.split(b"/")
        return path in folders or any(b"/".join(parts[:n]) in owned for n in range(1, len(parts) + 1))

    return sorted(path for path in paths if meets(path))


def _check_machine(done: SandboxExecResult, problem: str, timeout_s: float = GIT_TIMEOUT_S) -> None:
    """Raise an error if the machine was at fault, also where the script went on without what failed."""
    if done.timed_out:
        raise RepositoryError(f"{problem} within {timeout_s:.0f} s", of_the_machine=True)
    if done.return_code is None or done.return_code > _SIGNALS or _TROUBLE.search(done.stderr):
        raise RepositoryError(f"{problem}: {_ending(done)}", of_the_machine=True)


def _check(done: SandboxExecResult, problem: str, timeout_s: float = GIT_TIMEOUT_S) -> None:
    _check_machine(done, problem, timeout_s)
    if not done.ok:
        raise RepositoryError(f"{problem}: {_ending(done)}")


def _ending(done: SandboxExecResult) -> str:
    return _end(done.stderr) or f"exit status {done.return_code}"


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except binascii.Error as error:
        raise RepositoryError(f"the output is no base64: {text[:_SHOWN]!r}") from error


def _word(text: bytes) -> bytes:
    """Quote a word for the shell."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def _words(texts: Iterable[bytes]) -> bytes:
    return b" ".join(_word(text) for text in texts)


def _excluded(nested: Iterable[bytes]) -> bytes:
    return _words(b":(exclude,top,literal)" + path for path in nested)


def _end(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN else "..." + text[-_SHOWN:]
