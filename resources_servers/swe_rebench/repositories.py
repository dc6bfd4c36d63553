"""Builds the repositories of the example rows from the files in `sources/`.

    sources/<name>/base/         the files at the base commit
    sources/<name>/golden.patch  the reference solution
    sources/<name>/test.patch    the tests that come with it
    sources/<name>/row.yaml      the rest of the row

A built repository is an image of the local sandbox provider: a folder with a working tree and its `.git`. Like a
real project's it goes on after the base commit: the solution is committed on `main`, tagged and packed, an unmerged
branch and a stash stand beside it, and the reflog knows all of them. Names, dates and modes are fixed, so commits
are the same everywhere. It needs `git` and nothing else.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

SOURCES: Final = Path(__file__).parent / "sources"
IMAGE_PREFIX: Final = "swe-rebench-example-"

_IGNORED: Final = "__pycache__/\n*.pyc\n"
_ENVIRONMENT: Final = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "Example Author",
    "GIT_AUTHOR_EMAIL": "author@example.invalid",
    "GIT_COMMITTER_NAME": "Example Author",
    "GIT_COMMITTER_EMAIL": "author@example.invalid",
    "LC_ALL": "C",
}
_FIRST_DATE: Final = 1_700_000_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExampleRepository:
    """A folder of `sources/`.

    Args:
        name: Its name.
        folder: Where it is.
        settings: What its `row.yaml` says.
    """

    name: str
    folder: Path
    settings: dict[str, Any]

    @property
    def image_name(self) -> str:
        """The name of the image that it is built as."""
        return IMAGE_PREFIX + self.name

    @property
    def patch(self) -> str:
        """The reference solution."""
        return (self.folder / "golden.patch").read_text(encoding="utf-8")

    @property
    def test_patch(self) -> str:
        """The tests that come with it."""
        return (self.folder / "test.patch").read_text(encoding="utf-8")


def example_repositories(sources: Path = SOURCES) -> list[ExampleRepository]:
    """Return the repositories that can be built, by name."""
    return [
        ExampleRepository(file.parent.name, file.parent, yaml.safe_load(file.read_text(encoding="utf-8")))
        for file in sorted(sources.glob("*/row.yaml"))
    ]


def sources_fingerprint(sources: Path = SOURCES) -> str:
    """Return a short name for what the repositories are built from; it changes when any of the files does."""
    digest = hashlib.sha256()
    for path in (*sorted(sources.rglob("*")), Path(__file__)):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.name}\0{path.parent.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_repository(repository: ExampleRepository, target: Path) -> str:
    """Build a repository into the folder `target`, which must not exist yet.

    Returns:
        The base commit, which is checked out.
    """
    target.mkdir(parents=True)
    git = _Git(target)
    git("init", "-q", "--template=", "--initial-branch=main")
    (target / ".gitignore").write_text(_IGNORED, encoding="utf-8")
    git.commit("Begin")
    shutil.copytree(repository.folder / "base", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc"))
    # A checkout's or an installation's own modes say nothing.
    for path in target.rglob("*"):
        if path.is_file() and ".git" not in path.relative_to(target).parts:
            path.chmod(0o644)
    base_commit = git.commit(f"Add {repository.name}")
    for name in ("golden.patch", "test.patch"):
        git("apply", "--index", "--whitespace=nowarn", str((repository.folder / name).resolve()))
    git.commit("Fix what was wrong")
    git("tag", "-a", "-m", "With the fix", "v1.1")
    (target / "CHANGES.md").write_text("The fix is in.\n", encoding="utf-8")
    git("add", "-A")
    git("stash", "push", "-q")
    git("checkout", "-q", "-b", "next")
    (target / "CHANGES.md").write_text("What comes next.\n", encoding="utf-8")
    git.commit("Plan what comes next")
    git("checkout", "-q", "main")
    git("pack-refs", "--all")
    git("repack", "-q", "-a", "-d")
    git("checkout", "-q", "--detach", base_commit)
    return base_commit


def build_images(images_dir: Path, sources: Path = SOURCES) -> dict[str, str]:
    """Build all repositories as images below `images_dir`; those already there are kept.

    Several processes may do so at once: one builds, the others wait.

    Returns:
        The base commit of each image, by the image's name.
    """
    images_dir.mkdir(parents=True, exist_ok=True)
    commits: dict[str, str] = {}
    with (images_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for repository in example_repositories(sources):
            image = images_dir / repository.image_name
            if not (image / ".git").is_dir():
                _build_in_place(repository, image)
            commits[repository.image_name] = _Git(image)("rev-parse", "HEAD").strip()
    return commits


def _build_in_place(repository: ExampleRepository, image: Path) -> None:
    # Under another name first: an image is there as a whole or not at all, also after a kill.
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".building-") as folder:
        build_repository(repository, Path(folder) / "image")
        (Path(folder) / "image").rename(image)
    logger.info("built the example repository %s", image)


class _Git:
    """Runs git in one folder, free of the user's settings; each commit is a minute after the one before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._date = _FIRST_DATE

    def __call__(self, *arguments: str) -> str:
        date = f"{self._date} +0000"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        done = subprocess.run(  # noqa: S603 - the arguments are ours
            ["git", *arguments],  # noqa: S607
            cwd=self._folder,
            env={**kept, **_ENVIRONMENT, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"git {' '.join(arguments)} in {self._folder} failed: {done.stderr.strip()}")
        return done.stdout

    def commit(self, message: str) -> str:
        self._date += 60
        self("add", "-A")
        self("commit", "-q", "-m", message)
        return self("rev-parse", "HEAD").strip()
