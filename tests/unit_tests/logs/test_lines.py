"""A record is one line that says where it comes from, whatever is in it."""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from nemo_gym.logs import TRACEBACK_MARK, read_line, rollout_id, session_id, trace_id
from tests.unit_tests.logs.log_writing import Written

# Lines are broken by more than line feeds, and surrogates can't be encoded.
any_text = st.text(st.characters(codec=None)) | st.text(st.sampled_from("ab \r\n\x1b\x85\u2028\ud800\x00:|{}\"'\\"))
few = settings(max_examples=40, deadline=None)


@pytest.fixture(autouse=True)
def nothing_served() -> Iterator[None]:
    tokens = [(variable, variable.set(None)) for variable in (rollout_id, session_id, trace_id)]
    yield
    for variable, token in tokens:
        variable.reset(token)


def fail(text: str) -> None:
    raise ValueError(text)


def log_failure(written: Written, text: str) -> None:
    try:
        fail(text)
    except ValueError:
        written.logger.exception("it failed")


def test_a_line_says_when_where_what_and_for_whom() -> None:
    written = Written()
    rollout_id.set("17-3")
    session_id.set("0123456789abcdef0123456789abcdef")
    written.logger.warning("the tool %s is %s", "spoon", "bent")
    pattern = (
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING counter/w1 \d+ session=01234567 rollout=17-3 "
        r"nemo_gym\.test: the tool spoon is bent\n"
    )
    assert re.fullmatch(pattern, written.text)


def test_a_json_line_has_the_same_in_fields() -> None:
    written = Written("json")
    rollout_id.set("17-3")
    session_id.set("0123456789abcdef0123456789abcdef")
    trace_id.set("ab" * 16)
    written.logger.info("hello")
    found = json.loads(written.text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found.pop("pid") > 0
    assert found == {
        "level": "INFO",
        "server": "counter",
        "worker": "w1",
        "session": "01234567",
        "rollout": "17-3",
        "trace": "ab" * 16,
        "logger": "nemo_gym.test",
        "message": "hello",
    }


def test_the_line_of_an_exception_says_which_and_where_and_the_traceback_follows_marked() -> None:
    written = Written()
    log_failure(written, "no spoon")
    first, *rest = written.lines
    assert re.search(r"nemo_gym\.test: it failed: ValueError: no spoon \(logs/test_lines\.py:\d+\)$", first)
    assert rest[0] == f"{TRACEBACK_MARK}Traceback (most recent call last):"
    assert rest[-1] == f"{TRACEBACK_MARK}ValueError: no spoon"
    assert all(line.startswith(TRACEBACK_MARK) for line in rest)


def test_a_json_line_holds_the_traceback_as_a_field() -> None:
    written = Written("json")
    log_failure(written, "no\nspoon")
    (line,) = written.lines
    found = json.loads(line)
    assert found["exception"].startswith("ValueError: no\nspoon (logs/test_lines.py:")
    assert found["traceback"].startswith("Traceback (most recent call last):\n")
    assert found["traceback"].endswith("ValueError: no\nspoon")


@few
@given(any_text, any_text, any_text)
def test_nothing_from_outside_breaks_a_line_or_forges_one(message: str, rollout: str, session: str) -> None:
    rollout_id.set(rollout)
    session_id.set(session)
    for form in ("text", "json"):
        written = Written(form)
        written.logger.error("%s", message)
        assert len(written.texts) == 1
        assert len(written.text.splitlines()) == 1
        assert written.text.endswith("\n")
        assert {unicodedata.category(letter) for letter in written.text[:-1]}.isdisjoint({"Cc", "Cs", "Zl", "Zp"})
        written.text.encode()


@few
@given(any_text)
def test_nothing_in_an_exception_breaks_out_of_its_traceback(text: str) -> None:
    written = Written()
    log_failure(written, text)
    first, *rest = written.lines
    assert len(written.text.splitlines()) == 1 + len(rest)
    assert read_line(first) is not None
    assert all(line.startswith(TRACEBACK_MARK) and read_line(line) is None for line in rest)
    as_json = Written("json")
    log_failure(as_json, text)
    assert len(as_json.text.splitlines()) == 1
    assert json.loads(as_json.text)["traceback"].startswith("Traceback")


@few
@given(any_text, st.sampled_from([logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL]))
def test_a_line_is_read_back_in_either_form(message: str, level: int) -> None:
    rollout_id.set("17-3")
    read = []
    for form in ("text", "json"):
        written = Written(form)
        written.logger.log(level, "%s", message)
        found = read_line(written.lines[0])
        assert found is not None
        assert found.level == logging.getLevelName(level)
        read.append(found.message)
    assert read[1] == message
    if message.isprintable():
        assert read[0] == message


def test_the_beginning_of_a_json_line_is_read_back_with_its_exception() -> None:
    written = Written("json")
    log_failure(written, 'no "spoon"')
    found = read_line(written.lines[0][:400])
    assert found is not None
    assert found.message.startswith('it failed: ValueError: no "spoon" (')


@pytest.mark.parametrize(
    "line", ["", "hello", "Traceback (most recent call last):", '{"level": "ERROR"}', "2026 ERROR"]
)
def test_other_text_is_not_taken_for_a_line(line: str) -> None:
    assert read_line(line) is None


def test_a_message_that_its_arguments_do_not_fit_is_written_all_the_same() -> None:
    written = Written()
    written.logger.error("%d spoons", "no")
    written.logger.error("%s %s", "one")
    assert "%d spoons (its arguments could not be written: TypeError)" in written.lines[0]
    assert len(written.lines) == 2


def test_a_long_message_keeps_its_two_ends() -> None:
    written = Written()
    written.logger.error("%s", "begin" + "x" * 1_000_000 + "end")
    assert len(written.text) < 10_000
    assert re.search(r"beginx+ \.\.\. \d+ characters left out \.\.\. x+end\n", written.text)
