"""Whether a resources server's sessions keep their state on several workers: what `gym env test --num-workers` asks.

Each example row is run once by an agent, on one worker. What that rollout asked of the resources server (seed, tool
calls, verify) is then replayed: alone on one worker, among other sessions on one worker, and among other sessions on
several workers with every request on another connection. All replies have to be the same.
"""

from nemo_gym.conformance.check import ConformanceJob as ConformanceJob, check_conformance as check_conformance
from nemo_gym.conformance.report import (
    ConformanceReport as ConformanceReport,
    Finding as Finding,
    FindingKind as FindingKind,
)
