"""Sandboxes of the local provider for the tests, and an image with a repository that has a bit of everything."""

import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec, create_provider
from nemo_gym.server_utils import ServerClient
from resources_servers.swe_rebench.app import SweRebenchResourcesServer, SweRebenchResourcesServerConfig
from resources_servers.swe_rebench.patches import Repository
from resources_servers.swe_rebench.tests.serving import Build, sandboxes

IMAGE = "a-bit-of-everything"

_BUILD = r"""
set -e
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
mkdir "$1"; cd "$1"
git init -q --template= --initial-branch=main
printf 'one\n' > early.txt; git add -A; git commit -qm early
printf 'one\ntwo\nthree\n' > text.txt
printf 'a\000b\377' > data.bin
printf '#!/bin/sh\necho hi\n' > run.sh
printf 'no newline' > "with blank.txt"
mkdir -p lib/deep tests; printf 'x = 1\n' > lib/deep/mod.py; printf 'y = 1\n' > lib/other.py
printf 'check\n' > tests/check.txt
ln -s text.txt link
printf '*.log\nbuild/\n' > .gitignore
git add -A; git commit -qm base; git tag base
printf 'the secret fix\n' > text.txt; git add -A; git commit -qm "the fix"; git tag -a -m later later
printf 'stashed secret\n' > text.txt; git stash -q
git checkout -q -b other; printf 'branch secret\n' > text.txt; git add -A; git commit -qm other
git checkout -q main; git update-ref refs/notes/x main; git update-ref refs/remotes/origin/main main
echo "$(git rev-parse main) branch 'main' of example" > .git/FETCH_HEAD
printf '#!/bin/sh\ntouch hook-ran\n' > .git/hooks-were-here
# What the image's makers left: a file git does not track, a repository within, and something that is ignored.
printf 'kept by the image\n' > untracked.txt
mkdir -p vendor/inner build; (cd vendor/inner; git init -q --template=; echo v > v.txt; git add -A; git commit -qm v)
echo made > build/made
"""


@pytest.fixture(scope="session")
def images_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    subprocess.run(["sh", "-c", _BUILD, "sh", str(folder / IMAGE)], check=True)
    return folder


@pytest.fixture(scope="session")
def base_commit(images_dir: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "base^{commit}"], cwd=images_dir / IMAGE, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
async def fresh(images_dir: Path, base_commit: str) -> AsyncIterator[Callable[[], Awaitable[Repository]]]:
    """Start sandboxes with the repository prepared; all are stopped at the end."""
    provider = create_provider({"type": "local", "images_dir": str(images_dir)})

    async def start() -> Repository:
        sandbox = AsyncSandbox(provider, SandboxSpec(image=IMAGE))
        await sandbox.start()
        return await Repository.prepare(sandbox, sandbox.workdir, base_commit)

    yield start
    await provider.close()


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def build(state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """Make a running server; its sandboxes have their folders in `tmp_path`, and none is left at its end."""
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(state))

    @asynccontextmanager
    async def running(**settings: Any) -> AsyncIterator[FastAPI]:
        settings = {"sandbox_provider": {"type": "local", "root_dir": str(tmp_path)}, "test_timeout_s": 60, **settings}
        config = SweRebenchResourcesServerConfig(host="", port=0, entrypoint="", name="swe", **settings)
        server = SweRebenchResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
        app = server.setup_webserver()
        async with app.router.lifespan_context(app):
            yield app
        assert sandboxes(tmp_path) == []

    return running
