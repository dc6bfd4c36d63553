"""Reads logs as test runners write them, with what gets between."""

import json
import time

import pytest

from resources_servers.swe_rebench.log_parsers import LOG_PARSERS, Status, UnknownLogParserError, find_log_parser

PASSED, FAILED, ERROR, SKIPPED = Status.PASSED, Status.FAILED, Status.ERROR, Status.SKIPPED
XFAILED, XPASSED = Status.XFAILED, Status.XPASSED


def parse(name: str, log: str) -> dict[str, Status]:
    return find_log_parser(name).parse(log)


# pytest

PYTEST_VERBOSE = """\
============================= test session starts ==============================
platform linux -- Python 3.11.7, pytest-9.2.0, pluggy-1.6.0 -- /usr/bin/python3
cachedir: .pytest_cache
rootdir: /testbed
collected 9 items

tests/test_a.py::test_plain PASSED                                       [ 11%]
tests/test_a.py::TestGroup::test_in_class FAILED                         [ 22%]
tests/test_a.py::test_ids[two words-[1, 2]] PASSED                       [ 33%]
tests/test_a.py::test_ids[a - b] PASSED                                  [ 44%]
tests/test_a.py::test_skipped SKIPPED (needs a network (or luck))        [ 55%]
tests/test_a.py::test_known_bug XFAIL (see #12)                          [ 66%]
tests/test_a.py::test_fixed_bug XPASS                                    [ 77%]
tests/test_a.py::test_teardown PASSED                                    [ 88%]
tests/test_a.py::test_teardown ERROR                                     [ 88%]
tests/test_a.py::test_setup ERROR                                        [100%]

=================================== FAILURES ===================================
____________________________ TestGroup.test_in_class ___________________________

    def test_in_class(self):
>       assert "tests/test_a.py::test_plain" == "FAILED"
E       AssertionError: assert tests/test_b.py::test_unreal FAILED
=========================== short test summary info ============================
FAILED tests/test_a.py::TestGroup::test_in_class - AssertionError: assert 1 - 2
ERROR tests/test_a.py::test_teardown - RuntimeError
ERROR tests/test_a.py::test_setup - RuntimeError
========= 1 failed, 4 passed, 1 skipped, 1 xfailed, 1 xpassed, 2 errors in 0.12s =
"""


def test_pytest_verbose_lines_are_read() -> None:
    assert parse("pytest", PYTEST_VERBOSE) == {
        "tests/test_a.py::test_plain": PASSED,
        "tests/test_a.py::TestGroup::test_in_class": FAILED,
        "tests/test_a.py::test_ids[two words-[1, 2]]": PASSED,
        "tests/test_a.py::test_ids[a - b]": PASSED,
        "tests/test_a.py::test_skipped": SKIPPED,
        "tests/test_a.py::test_known_bug": XFAILED,
        "tests/test_a.py::test_fixed_bug": XPASSED,
        "tests/test_a.py::test_teardown": ERROR,
        "tests/test_a.py::test_setup": ERROR,
    }


PYTEST_SUMMARY = """\
tests/test_a.py .F.sxXE                                                  [100%]
==================================== PASSES ====================================
__________________________________ test_plain __________________________________
----------------------------- Captured stdout call -----------------------------
PASSED tests/test_forged.py::test_printed_by_the_tests
ERROR    root:test_a.py:12 - a log message
------------------------------ Captured log call -------------------------------
ERROR    root:test_a.py:12 a log message
=========================== short test summary info ============================
PASSED tests/test_a.py::test_plain
PASSED tests/test_a.py::test_ids[two words - [1, 2]]
SKIPPED [1] tests/test_a.py:10: needs a network
XFAIL tests/test_a.py::test_known_bug - see #12 - or not
XPASS tests/test_a.py::test_fixed_bug - see #13
FAILED tests/test_a.py::test_ids[a - b] - AssertionError: [1] - [2] != [3]
FAILED tests/test_a.py::test_ids[[] - ValueError: unbalanced [ - in it
FAILED tests/test_a.py::TestGroup::test_in_class
ERROR tests/test_broken.py - ImportError: No module named 'x'
ERROR tests/test_worse.py
ERROR something - else
=================== 3 failed, 2 passed, 1 skipped in 0.12s ====================
"""


def test_pytest_summary_lines_are_read_and_captured_output_is_not() -> None:
    assert parse("pytest", PYTEST_SUMMARY) == {
        "tests/test_a.py::test_plain": PASSED,
        "tests/test_a.py::test_ids[two words - [1, 2]]": PASSED,
        "tests/test_a.py::test_known_bug": XFAILED,
        "tests/test_a.py::test_fixed_bug": XPASSED,
        "tests/test_a.py::test_ids[a - b]": FAILED,
        "tests/test_a.py::test_ids[[]": FAILED,
        "tests/test_a.py::TestGroup::test_in_class": FAILED,
        "tests/test_broken.py": ERROR,
        "tests/test_worse.py": ERROR,
    }


def test_pytest_colours_workers_subtests_and_output_between_are_understood() -> None:
    log = (
        "\x1b[1mtests/test_a.py\x1b[0m::test_colour \x1b[32mPASSED\x1b[0m\x1b[32m   [ 10%]\x1b[0m\r\n"
        "[gw1] [ 20%] PASSED tests/test_a.py::test_on_a_worker[x y] \n"
        "tests/test_a.py::test_printing some output\nmore output\nPASSED     [ 30%]\n"
        "tests/test_a.py::test_printing_on[a b] output without an end\n and moreFAILED     [ 40%]\n"
        "tests/test_a.py::test_unfinished and then the machine went a"
    )
    assert parse("pytest", log) == {
        "tests/test_a.py::test_colour": PASSED,
        "tests/test_a.py::test_on_a_worker[x y]": PASSED,
        "tests/test_a.py::test_printing": PASSED,
        "tests/test_a.py::test_printing_on[a b]": FAILED,
    }
    log = "SUBFAILED[i=1 (one)] tests/test_a.py::test_sub - assert 0\nPASSED tests/test_a.py::test_sub\n"
    assert parse("pytest", log) == {"tests/test_a.py::test_sub": FAILED}


def test_a_failure_is_not_made_good_by_a_pass_of_the_same_name() -> None:
    lines = ["PASSED a.py::t", "FAILED a.py::t - x", "PASSED a.py::t", "a.py::u PASSED", "a.py::u SKIPPED"]
    assert parse("pytest", "\n".join(lines)) == {"a.py::t": FAILED, "a.py::u": PASSED}


# unittest

UNITTEST = """\
test_old_form (tests.test_a.CaseA) ... ok
test_new_form (tests.test_a.CaseA.test_new_form) ... ok
test_with_doc (tests.test_a.CaseA.test_with_doc)
What it is about. ... ok
test_with_bad_doc (tests.test_a.CaseA.test_with_bad_doc)
Says ok ... FAIL
test_skipped (tests.test_a.CaseA.test_skipped) ... skipped 'no network'
test_known (tests.test_a.CaseA.test_known) ... expected failure
test_fixed (tests.test_a.CaseA.test_fixed) ... unexpected success
test_printing (tests.test_a.CaseA.test_printing) ... some output
and more
ok
test_printing_on (tests.test_a.CaseA.test_printing_on) ... output without an endok
test_printing_badly (tests.test_a.CaseA.test_printing_badly) ... output without an endFAIL
test_error (tests.test_a.CaseA.test_error) ... ERROR
test_sub (tests.test_a.CaseA.test_sub) ...
  test_sub (tests.test_a.CaseA.test_sub) (i=1) ... FAIL
setUpClass (tests.test_a.CaseB) ... ERROR

======================================================================
FAIL: test_with_bad_doc (tests.test_a.CaseA.test_with_bad_doc)
Says ok
----------------------------------------------------------------------
AssertionError
======================================================================
FAIL: test_printing_badly (tests.test_a.CaseA.test_printing_badly)
----------------------------------------------------------------------
======================================================================
FAIL: test_sub (tests.test_a.CaseA.test_sub) (i=1)
----------------------------------------------------------------------
======================================================================
FAIL: test_sub (tests.test_a.CaseA.test_sub) [message] (i=2)
----------------------------------------------------------------------
======================================================================
ERROR: test_error (tests.test_a.CaseA.test_error)
----------------------------------------------------------------------
======================================================================
ERROR: setUpClass (tests.test_a.CaseB)
----------------------------------------------------------------------
Ran 13 tests in 0.003s

FAILED (failures=4, errors=2, skipped=1, expected failures=1)
"""


def test_unittest_is_read() -> None:
    case = "(tests.test_a.CaseA)"
    assert parse("unittest", UNITTEST) == {
        f"test_old_form {case}": PASSED,
        f"test_new_form {case}": PASSED,
        f"test_with_doc {case}": PASSED,
        f"test_with_bad_doc {case}": FAILED,
        f"test_skipped {case}": SKIPPED,
        f"test_known {case}": XFAILED,
        f"test_fixed {case}": XPASSED,
        f"test_printing {case}": PASSED,
        f"test_printing_on {case}": PASSED,
        f"test_printing_badly {case}": FAILED,
        f"test_error {case}": ERROR,
        f"test_sub {case}": FAILED,
        "setUpClass (tests.test_a.CaseB)": ERROR,
    }


def test_unittest_settles_nothing_without_the_verdict() -> None:
    log = "test_a (m.T.test_a) ... ok\ntest_b (m.T.test_b) ... noise\n"
    assert parse("unittest", log) == {"test_a (m.T)": PASSED}
    assert parse("unittest", log + "Ran 2 tests in 0.1s\n\nOK\n") == {"test_a (m.T)": PASSED, "test_b (m.T)": PASSED}
    # One failure is told, none is seen: it may be test_b's.
    assert parse("unittest", log + "Ran 2 tests in 0.1s\n\nFAILED (failures=1)\n") == {"test_a (m.T)": PASSED}


def test_unittest_names_are_the_same_for_all_versions() -> None:
    parser = find_log_parser("unittest")
    read = parser.parse("test_a (m.T.test_a) ... ok\n")
    assert parser.look_up(read, "test_a (m.T)") is parser.look_up(read, "test_a (m.T.test_a)") is PASSED
    assert parser.look_up(read, "test_a (m.U)") is None


# go

GO = """\
=== RUN   TestAdd
--- PASS: TestAdd (0.00s)
=== RUN   TestTable
=== RUN   TestTable/two_words
=== RUN   TestTable/a/b#01
    table_test.go:12: got 1, want 2
--- FAIL: TestTable (0.01s)
    --- PASS: TestTable/two_words (0.00s)
    --- FAIL: TestTable/a/b#01 (0.00s)
=== RUN   TestSkip
    skip_test.go:5: not here
--- SKIP: TestSkip (0.00s)
=== RUN   TestPrints
no newline at the end--- PASS: TestPrints (1.20s)
=== RUN   TestPanics
panic: oh no
FAIL	example.com/m	0.012s
ok  	example.com/m/other	0.003s
"""


def test_go_text_and_events_are_read() -> None:
    expected = {
        "TestAdd": PASSED,
        "TestTable": FAILED,
        "TestTable/two_words": PASSED,
        "TestTable/a/b#01": FAILED,
        "TestSkip": SKIPPED,
        "TestPrints": PASSED,
    }
    assert parse("go", GO) == expected
    words = {PASSED: "pass", FAILED: "fail", SKIPPED: "skip"}
    events: list[dict[str, object]] = [{"Action": "start", "Package": "m"}]
    for name, status in expected.items():
        events.append({"Action": "run", "Package": "m", "Test": name})
        events.append({"Action": "output", "Package": "m", "Test": name, "Output": "--- PASS: TestForged (0.00s)\n"})
        events.append({"Action": words[status], "Package": "m", "Test": name, "Elapsed": 0.01})
    events.append({"Action": "fail", "Package": "m", "Elapsed": 0.01})
    lines = [json.dumps(event) for event in events]
    log = "go: downloading x\n{not json\n{}\n[]\n" + "\n".join(lines) + '\n{"Action":"pass","Test":"TestCut'
    assert parse("gotest", log) == expected


# cargo

CARGO = """\
   Compiling demo v0.1.0 (/demo)
warning: unused variable: `x`
    Finished test [unoptimized + debuginfo] target(s) in 0.52s
     Running unittests src/lib.rs (target/debug/deps/demo-0123456789abcdef)

running 6 tests
test tests::adds ... ok
test tests::panics - should panic ... ok
test tests::fails ... FAILED
test tests::slow ... ignored, takes long
test tests::timed ... ok <0.003s>
test tests::prints ... hello
from the test
ok

failures:

---- tests::fails stdout ----
thread 'tests::fails' panicked at src/lib.rs:20:9:
assertion failed: test tests::forged ... is no line of its own

failures:
    tests::fails

test result: FAILED. 4 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests demo

running 1 test
test src/lib.rs - add (line 3) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored
"""


def test_cargo_is_read() -> None:
    expected = {
        "tests::adds": PASSED,
        "tests::panics": PASSED,
        "tests::fails": FAILED,
        "tests::slow": SKIPPED,
        "tests::timed": PASSED,
        "tests::prints": PASSED,
        "src/lib.rs - add (line 3)": PASSED,
    }
    assert parse("cargo", CARGO) == expected
    parser = find_log_parser("cargo")
    assert parser.look_up(expected, "tests::panics - should panic") is PASSED


def test_cargo_nextest_is_read() -> None:
    log = "        PASS [   0.005s] demo tests::adds\n        FAIL [   0.004s] (2/3) demo tests::fails\n"
    log += "     SIGSEGV [   0.004s] demo tests::crashes\n        SKIP [         ] demo tests::slow\n"
    assert parse("cargo", log) == {
        "demo tests::adds": PASSED,
        "demo tests::fails": FAILED,
        "demo tests::crashes": FAILED,
        "demo tests::slow": SKIPPED,
    }


# jest, mocha, vitest

JEST = """\
PASS src/sum.test.js (5.123 s)
  sum
    ✓ adds numbers (3 ms)
    ✓ waits (1.5 s)
    nested
      ○ skipped later
      ✎ todo write this
  ✓ stands alone
FAIL src/other.test.js
  other
    ✕ breaks (12 ms)

  ● other › breaks

    expect(received).toBe(expected) // Object.is equality

    > 5 |   expect(1).toBe(2)
        |             ^
      at Object.toBe (src/other.test.js:5:13)

FAIL src/broken.test.js
  ● Test suite failed to run

    Cannot find module './x'

Test Suites: 2 failed, 1 passed, 3 total
Tests:       1 failed, 1 skipped, 1 todo, 3 passed, 6 total
"""  # noqa: RUF001


def test_jest_is_read() -> None:
    assert parse("jest", JEST) == {
        "src/sum.test.js": PASSED,
        "sum > adds numbers": PASSED,
        "sum > waits": PASSED,
        "sum > nested > skipped later": SKIPPED,
        "sum > nested > todo write this": SKIPPED,
        "stands alone": PASSED,
        "src/other.test.js": FAILED,
        "other > breaks": FAILED,
        "src/broken.test.js": FAILED,
    }


MOCHA = """\

> demo@1.0.0 test
> mocha

  sum
    \x1b[32m  ✔\x1b[0m\x1b[90m adds numbers\x1b[0m
[a log line of the program]
    nested
      ✔ waits (1005ms)
      - is pending
      1) breaks

  other
    2) "before each" hook for "works"


  2 passing (1s)
  1 pending
  2 failing

  1) sum
       nested
         breaks:

      AssertionError [ERR_ASSERTION]: 1 == 2
      + expected - actual

      -1
      +2
      at Context.<anonymous> (test/sum.js:9:14)

  2) other
       "before each" hook for "works":
     Error: no


  again
    ✔ runs a second time

  1 passing (2ms)
"""


def test_mocha_is_read() -> None:
    assert parse("mocha", MOCHA) == {
        "sum > adds numbers": PASSED,
        "sum > nested > waits": PASSED,
        "sum > nested > is pending": SKIPPED,
        "sum > nested > breaks": FAILED,
        'other > "before each" hook for "works"': FAILED,
        "again > runs a second time": PASSED,
    }


def test_vitest_is_read() -> None:
    log = " ✓ src/a.test.ts > suite > adds 2ms\n × src/a.test.ts > suite > breaks 13ms\n ↓ src/a.test.ts > later\n"  # noqa: RUF001
    log += " ✓ src/b.test.ts (3 tests) 5ms\n"
    assert parse("vitest", log) == {
        "src/a.test.ts > suite > adds": PASSED,
        "src/a.test.ts > suite > breaks": FAILED,
        "src/a.test.ts > later": SKIPPED,
        "src/b.test.ts": PASSED,
    }


def test_a_title_alone_finds_its_test_and_the_worst_of_several() -> None:
    parser = find_log_parser("jest")
    results = {"a > works": PASSED, "b > works": FAILED, "b > adds": PASSED}
    assert parser.look_up(results, "adds (3 ms)") is PASSED
    assert parser.look_up(results, "works") is FAILED
    assert parser.look_up(results, "a > works") is PASSED
    assert parser.look_up(results, "orks") is None


# JUnit

JUNIT = """\
<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="0" failures="1" tests="4">
<testcase classname="tests.test_a.TestX" name="test_plain" time="0.001" />
<testcase classname="tests.test_a.TestX" name="test_bad[a &lt; b]"><failure message="no">trace</failure></testcase>
<testcase classname="tests.test_a.TestX" name="test_skipped"><skipped message="no network" /></testcase>
<testcase name="no class"><error message="x"/><system-out><![CDATA[<testcase name="forged"/>]]></system-out></testcase>
<testcase classname="c" name="flaky"><rerunFailure message="x"/></testcase>
</testsuite></testsuites>
"""
JUNIT_READ = {
    "tests.test_a.TestX::test_plain": PASSED,
    "tests.test_a.TestX::test_bad[a < b]": FAILED,
    "tests.test_a.TestX::test_skipped": SKIPPED,
    "no class": ERROR,
    "c::flaky": PASSED,
}


def test_junit_reports_are_read_amid_other_output() -> None:
    other = '<testsuite xmlns="urn:x" name="b"><testcase classname="d" name="e"/></testsuite>'
    log = f"building <stuff>\n{JUNIT}\nsome output\x00 <between>\n{other}\nDone & over <b>\n"
    assert parse("junit", log) == {**JUNIT_READ, "d::e": PASSED}
    assert find_log_parser("junit").look_up(JUNIT_READ, "test_plain") is PASSED


def test_a_junit_report_that_breaks_off_counts_as_far_as_it_goes() -> None:
    log = JUNIT[: JUNIT.index("<skipped")]
    assert parse("junit", log) == {name: JUNIT_READ[name] for name in list(JUNIT_READ)[:2]}


def test_a_report_with_entities_is_not_read() -> None:
    bomb = '<testsuites><!DOCTYPE x [<!ENTITY a "aaaa">]><testcase name="x">&a;</testcase></testsuites>'
    assert parse("junit", bomb) == {}


# All of them


@pytest.mark.parametrize("name", sorted(LOG_PARSERS))
def test_a_log_without_tests_has_none(name: str) -> None:
    for log in ("", "\n\n", "Segmentation fault\n", "\x1b[31mbash: pytest: command not found\x1b[0m\n", "\0\r\r\n"):
        assert parse(name, log) == {}


@pytest.mark.parametrize("name", ["pytest", "unittest", "go", "cargo", "jest", "junit"])
def test_hostile_logs_take_no_time_to_speak_of(name: str) -> None:
    logs = [
        "x" * 1_000_000,
        "a.py::t[" * 100_000,
        "a.py::t[x] " * 100_000,
        "FAILED a.py::t" + " - [" * 100_000,
        "test a ... " * 100_000,
        "<testsuites><testcase name='a'>" * 20_000,
        "  ✓ " * 100_000,
        "● a › b" * 100_000,  # noqa: RUF001
        "{" * 1_000_000,
        " " * 1_000_000 + "x",
        "=" * 1_000_000,
        "PASS " * 200_000,
        "<testsuite>\n" * 20_000,
    ]
    for log in logs:
        started = time.process_time()
        parse(name, log)
        assert time.process_time() - started < 2, log[:20]


@pytest.mark.parametrize(
    ("name", "log"), [("pytest", PYTEST_VERBOSE), ("go", GO), ("cargo", CARGO), ("junit", JUNIT), ("jest", JEST)]
)
def test_a_log_that_breaks_off_gives_no_test_that_the_whole_has_not(name: str, log: str) -> None:
    whole = parse(name, log)
    for end in log.splitlines(keepends=True):
        part = parse(name, log[: log.index(end) + len(end)])
        assert part.keys() <= whole.keys()


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("parse_log_pytest", "pytest"),
        ("parse_log_pytest_v2", "pytest"),
        ("Parse_Log_PyTest_options", "pytest"),
        ("parse_log_gotest", "go"),
        ("parse-log-cargo", "cargo"),
        ("parse_log_jest", "jest"),
        ("parse_log_mocha", "mocha"),
        ("parse_log_django", "unittest"),
        ("junit-xml", "junit"),
    ],
)
def test_parsers_are_found_by_the_datasets_names(name: str, same_as: str) -> None:
    assert find_log_parser(name) is LOG_PARSERS[same_as]


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownLogParserError, match=r"no log parser 'pytset'; there are: cargo, .*mean 'pytest'"):
        find_log_parser("pytset")
