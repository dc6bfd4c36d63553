"""What programs in bubblewrap must not find: the environments' own files, which hold the answers."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

import nemo_gym
from nemo_gym.sandbox import AsyncSandbox
from nemo_gym.sandbox.isolation import find_bubblewrap
from tests.e2e.sandbox.conftest import Start

INSTALLED = """
import asyncio, json, sys
from nemo_gym.sandbox import AsyncSandbox

async def main() -> None:
    config, secret = json.loads(sys.argv[1]), sys.argv[2]
    async with AsyncSandbox({"type": "local", "isolation": "bubblewrap", **config}) as sandbox:
        find = "find / -path /proc -prune -o -name golden.patch -print; cat " + secret
        python = "python3 -c 'import sys, pydantic; print(sys.prefix)'"
        found = [await sandbox.exec(command, timeout_s=60) for command in (find, python, "python3 -m nemo_gym")]
        print(json.dumps([[result.stdout, result.stderr] for result in found]))

asyncio.run(main())
"""


@pytest.fixture
def isolation() -> str:
    found = find_bubblewrap()
    if isinstance(found, str):
        pytest.skip(found)
    return "bubblewrap"


def make_root(root: Path) -> Path:
    """Make a folder that holds a component with an answer, and return the answer's path."""
    component = root / "resources_servers" / "task" / "sources"
    component.mkdir(parents=True)
    (component / "golden.patch").write_text("the answer")
    return component / "golden.patch"


@pytest.fixture
def installed(tmp_path: Path) -> tuple[Path, Path]:
    """The Python of an environment with a copy of the package, and an answer in it.

    It is below /tmp, which a sandbox has its own of.
    """
    place = tmp_path / "project" / "venv"
    venv.create(place, symlinks=True)
    packages = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    shutil.copytree(Path(nemo_gym.__file__).parent, packages / "nemo_gym", ignore=shutil.ignore_patterns("__pycache__"))
    # The sandbox sees only its own environment's folders: what it shall import is copied.
    for name in ("pydantic", "pydantic_core", "annotated_types", "typing_extensions.py", "typing_inspection"):
        source = Path(sysconfig.get_paths()["purelib"]) / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, packages / name)
    (packages / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return place / "bin" / "python", make_root(packages)


async def look(python: Path, cwd: Path, secret: Path, **config: Any) -> list[tuple[str, str]]:
    """Return what the commands of `INSTALLED` print."""
    argv = [str(python), "-c", INSTALLED, json.dumps(config), str(secret)]
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return [(stdout, stderr) for stdout, stderr in json.loads(out)]


async def test_an_installed_package_hides_its_components(
    isolation: str, installed: tuple[Path, Path], tmp_path: Path
) -> None:
    python, answer = installed
    (tmp_path / "cwd").mkdir()
    (found, missing), (prefix, _), (_, said) = await look(
        python, tmp_path / "cwd", answer, root_dir=str(tmp_path / "sandboxes")
    )
    assert (found, "No such file" in missing) == ("", True)
    assert prefix == f"{python.parent.parent}\n"
    assert "No module named nemo_gym" in said


async def test_a_working_directory_with_pythons_environment_in_it_is_hidden_around_that(
    isolation: str, installed: tuple[Path, Path], tmp_path: Path
) -> None:
    python, _ = installed
    (tmp_path / "project" / "env.yaml").write_text("secret")
    config = {"root_dir": str(tmp_path / "sandboxes"), "visible_paths": [str(tmp_path)]}
    (found, missing), (prefix, _), _ = await look(
        python, tmp_path / "project", tmp_path / "project" / "env.yaml", **config
    )
    assert (found, "No such file" in missing, prefix) == ("", True, f"{python.parent.parent}\n")


async def test_component_roots_below_visible_paths_are_hidden(
    make: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    answers = [make_root(seen / name) for name in ("cwd", "extra")]
    for name in ("cwd", "extra", "tools"):
        (seen / name).mkdir(exist_ok=True)
        (seen / name / "env.yaml").write_text(name)
    monkeypatch.chdir(seen / "cwd")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(seen / "extra"))
    (tmp_path / "link").symlink_to(seen)
    for visible in (seen, tmp_path / "link"):
        sandbox: AsyncSandbox = await make({"visible_paths": [str(visible)]})
        assert (await sandbox.exec(f"cat {visible}/*/env.yaml")).stdout == "tools"
        script = f"find / -path /proc -prune -o -name golden.patch -print; cat {' '.join(map(str, answers))}"
        assert (await sandbox.exec(script, timeout_s=60)).stdout == ""
        assert not (await sandbox.exec(f"touch {visible}/cwd/planted")).ok


async def test_what_is_named_itself_is_visible_but_for_the_components_below(
    make: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = make_root(tmp_path / "seen" / "cwd")
    data = tmp_path / "seen" / "cwd" / "resources_servers" / "task" / "data"
    data.mkdir()
    (data / "words").write_text("words")
    monkeypatch.chdir(tmp_path / "seen" / "cwd")
    (tmp_path / "seen" / "cwd" / "notes").write_text("notes")
    sandbox: AsyncSandbox = await make({"visible_paths": [str(tmp_path / "seen" / "cwd"), str(data)]})
    assert (await sandbox.exec(f"cat notes {answer} {data}/words", cwd=str(tmp_path / "seen" / "cwd"))).stdout == (
        "noteswords"
    )


async def test_other_sandboxes_below_a_visible_path_are_hidden(make: Start, root: Path) -> None:
    settings: dict[str, Any] = {"visible_paths": [str(root.parent)]}
    first: AsyncSandbox = await make(settings, files={"secret": "1"})
    second: AsyncSandbox = await make(settings)
    assert (await first.exec("cat secret")).stdout == "1"
    assert (await second.exec(f"find {root} -mindepth 1")).stdout == ""


async def test_the_command_line_inside_names_no_path_of_the_machine(make: Start, root: Path) -> None:
    sandbox: AsyncSandbox = await make()
    assert str(root) not in (await sandbox.exec("cat /proc/*/cmdline /proc/*/environ")).stdout
    assert (await sandbox.exec("readlink /proc/*/fd/* | grep options")).stdout == ""
