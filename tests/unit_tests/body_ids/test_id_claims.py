"""Claims of ids, made by processes that race."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nemo_gym.server.id_claims import IdClaims
from tests.session_workers import leave_stale_socket

NAMES = 400
DEAD, LIVING = "d" * 32, ["a" * 32, "b" * 32, "c" * 32]

RIVAL = """
import socket, sys
from pathlib import Path
from nemo_gym.server.id_claims import IdClaims
folder, worker_id, names = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(str(folder / worker_id))
    sock.listen(1000)
    claims = IdClaims(folder, worker_id)
    print("ready", flush=True)
    sys.stdin.readline()
    won = [name for name in map(str, range(names)) if claims.take(name)]
    print(" ".join(won), flush=True)
    sys.stdin.readline()
    for name in won:
        claims.release(name)
"""


def test_of_processes_that_take_over_a_dead_workers_claims_each_is_won_by_one(sockets: Path) -> None:
    leave_stale_socket(sockets, DEAD)
    dead = IdClaims(sockets, DEAD)
    for name in range(0, NAMES, 2):
        assert dead.take(str(name))
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(sockets), worker_id, str(NAMES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for worker_id in LIVING
    ]

    def tell_all() -> None:
        for rival in rivals:
            assert rival.stdin is not None
            rival.stdin.write("go\n")
            rival.stdin.flush()

    def read_all() -> list[str]:
        return [rival.stdout.readline() for rival in rivals if rival.stdout is not None]

    try:
        assert read_all() == ["ready\n"] * len(rivals)
        tell_all()
        won = [line.split() for line in read_all()]
        assert sorted(name for names in won for name in names) == sorted(map(str, range(NAMES)))
        for worker_id, names in zip(LIVING, won, strict=True):
            assert {dead.holder(name) for name in names} <= {worker_id}
        tell_all()
        assert [rival.wait(20) for rival in rivals] == [0] * len(rivals)
    finally:
        for rival in rivals:
            rival.kill()
            rival.communicate()
    assert [path.name for path in (sockets / "ids").iterdir()] == ["lock"]


def test_a_claim_of_another_worker_is_not_given_up(sockets: Path) -> None:
    one, other = IdClaims(sockets, LIVING[0]), IdClaims(sockets, LIVING[1])
    assert one.take("a")
    other.release("a")
    assert one.holder("a") == LIVING[0]
    one.release("a")
    one.release("a")
    assert one.holder("a") is None
