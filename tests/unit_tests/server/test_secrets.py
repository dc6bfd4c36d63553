"""Where the session secret comes from, and that nobody else can know it."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.paths import state_dir
from nemo_gym.server.secrets import SESSION_SECRET_ENV, derive_session_key, session_secrets

GOOD = "a secret that nobody guesses"


def test_a_configured_secret_is_used() -> None:
    assert session_secrets({"session_secret": GOOD}) == [GOOD]


@pytest.mark.promise("secrets-rotate")
def test_of_several_secrets_the_first_signs() -> None:
    assert session_secrets({"session_secret": [GOOD, GOOD + " (old)"]}) == [GOOD, GOOD + " (old)"]


def test_the_environment_may_hold_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SESSION_SECRET_ENV, f"{GOOD},{GOOD} (old)")
    assert session_secrets({}) == [GOOD, f"{GOOD} (old)"]


@pytest.mark.promise("secret-private")
@pytest.mark.parametrize("bad", ["short", 12345678901234567890, ["short"]])
def test_a_secret_that_can_be_guessed_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="session_secret: expected a text of at least 16 characters"):
        session_secrets({"session_secret": bad})


@pytest.mark.promise("secret-private")
def test_without_configuration_it_is_random_kept_and_private() -> None:
    first = session_secrets({})
    assert session_secrets({}) == first
    file = state_dir() / "session_secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in state_dir().iterdir()] == ["session_secret"]
    file.unlink()
    assert session_secrets({}) != first


def test_processes_that_ask_at_once_get_the_same_secret() -> None:
    code = "from nemo_gym.server.secrets import session_secrets as s; import sys; sys.stdout.write(s({})[0])"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    outputs = {process.communicate()[0] for process in processes}
    assert len(outputs) == 1
    assert len(outputs.pop()) >= 32


@pytest.mark.promise("secret-private")
@pytest.mark.parametrize("how", ["readable by others", "a link"])
def test_a_secret_file_that_others_may_know_is_refused(how: str, tmp_path: Path) -> None:
    file = state_dir() / "session_secret"
    if how == "a link":
        (tmp_path / "elsewhere").write_text(GOOD)
        (tmp_path / "elsewhere").chmod(0o600)
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_text(GOOD)
        file.chmod(0o644)
    with pytest.raises(ConfigError, match="regular file that only you can read"):
        session_secrets({})


@pytest.mark.promise("secret-private")
def test_each_server_has_a_key_of_its_own() -> None:
    assert derive_session_key(GOOD, "A___a") != derive_session_key(GOOD, "A___b")
    assert derive_session_key(GOOD, "A___a") != derive_session_key(GOOD + "!", "A___a")
