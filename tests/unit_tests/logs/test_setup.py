"""A process writes its log by one handler, whatever else its libraries have set up."""

from __future__ import annotations

import json
import subprocess
import sys

KEY = "a-real-secret-0123456789"
PROGRAM = f"""
import gc, logging, sys, threading, warnings

def own_handler(name, propagates):
    log = logging.getLogger(name)
    log.addHandler(logging.StreamHandler())
    log.propagate = propagates
    return log

logging.basicConfig(stream=sys.stdout)
apart, passing = own_handler("apart", False), own_handler("passing", True)
kept = logging.FileHandler("/dev/null")
apart.addHandler(kept)

from nemo_gym.logs import end_process_log, name_worker, set_up_process_log
set_up_process_log("counter", None, {{"logging": {{"format": "json"}}}}, ["{KEY}"])
logging.basicConfig(force=True)
late = own_handler("late", False)
set_up_process_log("counter", None, {{"logging": {{"format": "json"}}}}, ["{KEY}"])
name_worker("w1")
for log in (apart, passing, late, logging.getLogger("plain")):
    log.warning("with %s", "{KEY}")
warnings.warn("with {KEY}")

class Dropped:
    def __del__(self):
        raise ValueError("with {KEY}")

Dropped()
threading.Thread(target=lambda: int("{KEY}"), name="it").start()
assert kept in apart.handlers
for _ in range(5):
    late.error("again")
end_process_log()
raise RuntimeError("with {KEY}")
"""


def test_whatever_writes_to_standard_error_by_logging_is_written_once_and_without_secrets() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert KEY not in result.stderr
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert {(line["server"], line["worker"]) for line in lines} == {("counter", "w1")}
    assert [line["logger"] for line in lines] == [
        "apart", "passing", "late", "plain", "py.warnings", "nemo_gym.logs.setup", "nemo_gym.logs.setup",
        "late", "late", "late", "late", "nemo_gym.logs.setup"]  # fmt: skip
    assert "2 more like this" in lines[-2]["message"]
    told = [line["exception"] for line in lines if "exception" in line]
    assert [text.partition(" (")[0] for text in told] == [
        "ValueError: with ***",
        "ValueError: invalid literal for int() with base 10: '***'",
        "RuntimeError: with ***",
    ]
    assert lines[-1]["message"] == "This process ends by an exception"


def test_a_log_on_a_full_disk_or_without_a_reader_breaks_nothing() -> None:
    program = (
        "import logging\n"
        "from nemo_gym.logs import end_process_log, set_up_process_log\n"
        "set_up_process_log('counter', None, {}, [])\n"
        "for _ in range(10): logging.error('gone')\n"
        "end_process_log()\n"
        "print('done')\n"
    )
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        result = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, timeout=60, check=True
        )
    assert result.stdout == b"done\n"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read() == b"done\n"
    assert process.wait(60) == 0


def test_importing_the_package_changes_nothing() -> None:
    program = (
        "import logging, sys, threading\n"
        "before = (sys.excepthook, sys.unraisablehook, threading.excepthook, logging.getLogger().level)\n"
        "import nemo_gym.base_resources_server, nemo_gym.logs.setup\n"
        "assert before == (sys.excepthook, sys.unraisablehook, threading.excepthook, logging.getLogger().level)\n"
        "assert not logging.getLogger().handlers\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
