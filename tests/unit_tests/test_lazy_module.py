"""A module is imported when something in it is first used, and is itself from then on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemo_gym.lazy_module import LazyModule


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LazyModule:
    (tmp_path / "late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    # So that what the test imports is forgotten after it.
    monkeypatch.setitem(sys.modules, "late", None)
    monkeypatch.delitem(sys.modules, "late")
    return LazyModule("late")


def test_a_module_is_imported_with_the_first_look_at_a_name(lazy: LazyModule) -> None:
    assert repr(lazy) == "LazyModule('late')"
    assert "late" not in sys.modules
    assert lazy.value == 1
    assert "late" in sys.modules


def test_its_names_are_always_the_modules_own(lazy: LazyModule, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lazy.value == 1
    monkeypatch.setattr("late.value", 2)
    assert lazy.value == 2


def test_a_missing_name_is_told_as_the_modules_own(lazy: LazyModule) -> None:
    with pytest.raises(AttributeError, match="module 'late' has no attribute 'other'"):
        _ = lazy.other


def test_a_missing_module_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        _ = LazyModule("no_such_module_at_all").name
