"""Takes patches out of real sandboxes, whatever the agent did to the repository, and puts them into others."""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from resources_servers.swe_rebench.patch_paths import patch_paths
from resources_servers.swe_rebench.patches import (
    BaselineLostError,
    PatchTooLargeError,
    Repository,
    RepositoryError,
)

pytestmark = pytest.mark.anyio

Fresh = Callable[[], Awaitable[Repository]]
LIMIT = 1_000_000

# All files with their kinds, modes and contents, but what a patch leaves out.
STATE = r"""
find . \( -iname .git -o -path ./build -o -path ./vendor/inner -o -name '*.log' \) -prune -o \( -type f -o -type l \) \
    -print0 | LC_ALL=C sort -z | while IFS= read -r -d '' f; do
        if [ -L "$f" ]; then k="link $(readlink "$f")"; elif [ -x "$f" ]; then k=x; else k=-; fi
        printf '%q %s %s\n' "$f" "$k" "$([ -L "$f" ] || sha1sum < "$f")"
    done
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def run(repository: Repository, command: str) -> str:
    done = await repository.sandbox.exec(["bash", "-c", command], cwd=repository.directory)
    assert done.ok, done
    return done.stdout


CHANGES = {
    "edited": r"""sed -i s/two/2/ text.txt; printf ' more' >> 'with blank.txt'; chmod 000 text.txt
        printf 'a\000c\377\000' > data.bin; head -c 5000 /dev/zero > new.bin; chmod +x data.bin run.sh; echo l > x.log
        mkdir -p fresh/deep; echo n > fresh/deep/new.py; : > empty.txt; chmod 644 text.txt""",
    "deleted": "rm text.txt data.bin; rm -r lib",
    "renamed": "git mv lib/deep/mod.py lib/moved.py; mv text.txt lib/text.txt; echo 4 >> lib/text.txt",
    "links": "rm link; ln -s lib link; ln -s /nowhere/at/all dangling; rm run.sh; ln -s text.txt run.sh",
    "kinds": "rm -r lib; echo file > lib; rm text.txt; mkdir text.txt; echo f > text.txt/f; rm link; echo f > link",
    "committed": "git checkout -qb work; sed -i s/two/2/ text.txt; git add -A; git commit -qm a; rm data.bin; "
    "git commit -qam b; echo c > c.txt; git add c.txt; echo d > d.txt; git rm -q --cached run.sh",
    "names": r"""touch -- -rf '--help' ' lead' 'trail ' $'new\nline' $'tab\there' 'quo"te' "apo's" 'back\slash' 'ünï'
        touch -- $'bad\xff' 'a*b' ':(top)x' '$HOME' '`id`' '@TREE@'; mkdir -- $'-d\n'; echo x > $'./-d\n/f'""",
    "odd things": "mkfifo pipe; mkdir hollow; echo s > .gitmodules; echo '* -text diff=x filter=y' > .gitattributes; "
    r"printf 'a\r\nb\n' > crlf.txt; echo changed > untracked.txt; echo more > vendor/inner/v.txt; echo o > vendor/out; "
    "mkdir lib/.GIT; echo x > lib/.GIT/y; mkdir own; cd own; git init -q .; echo o > o.txt; git add -A; "
    "git commit -qm o; mkdir in; cd in; git init -q .; echo i > i.txt",
    "no .git": "sed -i s/two/2/ text.txt; echo n > n.txt; rm -rf .git; echo 'gitdir: /nowhere' > .git",
    "broken .git": "sed -i s/two/2/ text.txt; rm data.bin; rm -rf .git/objects/pack .git/HEAD; echo x > .git/index",
    "all gone": "find . -mindepth 1 -maxdepth 1 ! -name vendor -exec rm -rf {} +",
}


@pytest.mark.parametrize("name", list(CHANGES))
async def test_a_patch_makes_the_same_files_elsewhere(fresh: Fresh, name: str) -> None:
    worked, other = await asyncio.gather(fresh(), fresh())
    assert worked.baseline == other.baseline
    await run(worked, CHANGES[name])
    expected = await run(worked, STATE)
    try:
        patch = await worked.extract_patch([], LIMIT)
    except BaselineLostError:
        assert name in ("no .git", "broken .git", "all gone")
        patch = await worked.extract_patch([], LIMIT, other)
    assert await run(other, STATE) != expected
    assert await other.apply(patch) is None
    assert await run(other, STATE) == expected


async def test_no_work_is_an_empty_patch(fresh: Fresh) -> None:
    worked = await fresh()
    await run(worked, "git commit -q --allow-empty -m nothing; touch text.txt; echo more > build/made; echo l > a.log")
    assert await worked.extract_patch([b"tests/check.txt"], LIMIT) == b""
    assert await (await fresh()).apply(b"") is None


async def test_ignored_files_count_only_when_the_agent_added_them(fresh: Fresh) -> None:
    worked = await fresh()
    await run(worked, "echo l > a.log; echo l > b.log; git add -f b.log; echo c > c.log; git add -f c.log; rm c.log")
    await run(worked, "echo s > d.log; git add -f d.log; git commit -qm d")
    assert patch_paths(await worked.extract_patch([], LIMIT)) == {b"b.log", b"d.log"}


async def test_files_of_the_test_patch_are_left_as_they_were(fresh: Fresh) -> None:
    owned = [b"tests/check.txt", b"tests/new.txt", b"gone/later.txt", b"tests/-odd\nname"]
    worked = await fresh()
    await run(worked, "echo cheat > tests/check.txt; echo cheat > tests/new.txt; echo ok > tests/mine.txt")
    await run(worked, "echo cheat > $'tests/-odd\\nname'; git add -A; git commit -qm cheat; echo 4 >> text.txt")
    assert patch_paths(await worked.extract_patch(owned, LIMIT)) == {b"tests/mine.txt", b"text.txt"}
    # Whole folders in the way of such a file, and files in the way of its folder.
    worked = await fresh()
    await run(worked, "rm -r tests; echo cheat > tests; mkdir -p gone/later.txt; echo cheat > gone/later.txt/x")
    assert await worked.extract_patch(owned, LIMIT) == b""


async def test_a_patch_beyond_the_limit_is_refused_and_not_read(fresh: Fresh) -> None:
    worked = await fresh()
    await run(worked, "head -c 3000000 /dev/urandom > big.bin")
    with pytest.raises(PatchTooLargeError, match="the limit is 1000000"):
        await worked.extract_patch([], LIMIT)


async def test_nothing_that_the_agent_configured_runs_when_its_work_is_read(fresh: Fresh) -> None:
    worked = await fresh()
    await run(
        worked,
        r"""
        printf '#!/bin/sh\necho ran >> %s/ran.log\ncat\n' "$PWD" > evil
        chmod +x evil; evil=$PWD/evil
        git config core.fsmonitor "$evil"; git config core.hooksPath "$PWD"; git config filter.evil.clean "$evil"
        git config filter.evil.process "$evil"; git config diff.evil.textconv "$evil"
        git config diff.evil.command "$evil"
        git config diff.external "$evil"; git config core.pager "$evil"; git config core.sshCommand "$evil"
        git config alias.diff "!$evil"; git config alias.add "!$evil"; git config core.worktree /nowhere
        for hook in post-index-change pre-commit reference-transaction; do cp evil "$hook"; done
        cp .git/config ~/.gitconfig
        printf '* filter=evil diff=evil\n' > .gitattributes; cp .gitattributes .git/info/attributes
        sed -i s/two/2/ text.txt; rm -f ran.log
        """,
    )
    patch = await worked.extract_patch([], LIMIT)
    assert b"-two\n+2\n" in patch
    assert await run(worked, "ls | grep -c ran.log || :") == "0\n"


async def test_the_agent_finds_no_object_of_the_later_history(fresh: Fresh, base_commit: str) -> None:
    repository = await fresh()
    found = await run(
        repository,
        "git cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' | grep commit; "
        "git for-each-ref --format='%(refname)'; git reflog; git stash list",
    )
    commits = [line.split()[0] for line in found.splitlines() if line.endswith(" commit")]
    assert len(commits) == 2
    assert base_commit in commits
    assert [line for line in found.splitlines() if line.startswith("refs/")] == ["refs/heads/main"]
    reflog = [line for line in found.splitlines() if "@{" in line]
    assert len(found.splitlines()) == len(commits) + 1 + len(reflog)
    assert all(base_commit.startswith(line.split()[0]) for line in reflog)
    everything = await run(
        repository,
        "git cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' | grep blob | cut -d' ' -f1 | "
        "git cat-file --batch; grep -r secret . || :",
    )
    assert "secret" not in everything
    assert "two" in everything
    assert await run(repository, "git status --porcelain; git log --format=%s; ls .git") == (
        "?? untracked.txt\n?? vendor/\nbase\nearly\nHEAD\nbranches\nconfig\nindex\ninfo\nlogs\nobjects\nrefs\n".replace(
            "branches\n", ""
        )
    )


async def test_a_repository_without_the_commit_is_an_error(images_dir: object) -> None:
    config = {"type": "local", "images_dir": str(images_dir)}
    async with AsyncSandbox(config, SandboxSpec(image="a-bit-of-everything")) as sandbox:
        with pytest.raises(RepositoryError, match=r"has no commit f{40}"):
            await Repository.prepare(sandbox, sandbox.workdir, "f" * 40)
        with pytest.raises(RepositoryError, match="could not be set to its base commit"):
            await Repository.prepare(sandbox, "/nowhere", "f" * 40)


async def test_a_patch_that_does_not_apply_changes_nothing_and_says_why(fresh: Fresh) -> None:
    repository = await fresh()
    before = await run(repository, STATE)
    good = b"diff --git a/n.txt b/n.txt\nnew file mode 100644\n--- /dev/null\n+++ b/n.txt\n@@ -0,0 +1 @@\n+n\n"
    bad = b"diff --git a/text.txt b/text.txt\n--- a/text.txt\n+++ b/text.txt\n@@ -1,2 +1,2 @@\n-nine\n+9\n two\n"
    outside = good.replace(b"/n.txt", b"/../../n.txt")
    for patch in (good + bad, outside, b"no patch at all"):
        problem = await repository.apply(patch)
        assert problem
        assert await run(repository, STATE) == before


async def test_files_that_a_checkout_converts_are_compared_as_they_lie(tmp_path: Path) -> None:
    image = tmp_path / "converted"
    build = (
        "git init -q --template= $1; cd $1; echo '*.txt text eol=crlf' > .gitattributes; printf 'a\\nb\\n' > x.txt; "
        "git add -A; git -c user.name=a -c user.email=a@b commit -qm base; rm x.txt; git checkout -q .; cat x.txt; "
        "git rev-parse HEAD"
    )
    command = ["sh", "-c", build, "sh", str(image)]
    done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    text, _, commit = done.stdout.strip().rpartition(b"\n")
    assert text == b"a\r\nb\r"
    config = {"type": "local", "images_dir": str(tmp_path)}
    patch = b"diff --git a/x.txt b/x.txt\n--- a/x.txt\n+++ b/x.txt\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    async with AsyncSandbox(config, SandboxSpec(image="converted")) as sandbox:
        repository = await Repository.prepare(sandbox, sandbox.workdir, commit.decode())
        assert await repository.extract_patch([], LIMIT) == b""
        # The dataset's patches are of the files in git.
        assert await repository.apply(patch) is None
        assert await sandbox.read(f"{repository.directory}/x.txt") == b"a\r\nc\r\n"
        assert await repository.apply(patch, backwards=True) is None
        assert await sandbox.read(f"{repository.directory}/x.txt") == b"a\r\nb\r\n"
        await run(repository, "printf 'a\\nd\\r\\n' > x.txt")
        own = await repository.extract_patch([], LIMIT)
        await run(repository, "printf 'a\\r\\nb\\r\\n' > x.txt")
        assert await repository.apply(own, exactly=True) is None
        assert await sandbox.read(f"{repository.directory}/x.txt") == b"a\nd\r\n"


@pytest.mark.parametrize(
    ("patch", "paths"),
    [
        (b"diff --git a/x y b/x y\nold mode 100644\nnew mode 100755\n", {b"x y"}),
        (b"diff --git a/a b/b\nsimilarity index 100%\nrename from a\nrename to b c\n", {b"a", b"b", b"b c"}),
        (b'diff --git "a/t\\303\\274\\n\\"q" "b/t\\303\\274\\n\\"q"\nnew file mode 100644\n', {b't\xc3\xbc\n"q'}),
        (b'--- a/old\n+++ "b/n\\tw"\t2020-01-01\n@@ -1 +1 @@\n--- a/no\n+++ b/no\n', {b"old", b"n\tw"}),
        (b"diff --git a/a b/a\nindex 1..2\nGIT binary patch\nliteral 1\nIcmZ\n\n", {b"a"}),
        (b"--- /dev/null\n+++ b/n\n@@ -0,0 +1,2 @@\n+diff --git a/q b/q\n+rename from z\n\\ No newline\n", {b"n"}),
        (b"", set()),
    ],
)
def test_the_paths_of_a_patch_are_read(patch: bytes, paths: set[bytes]) -> None:
    assert patch_paths(patch) == paths
