"""The counter server with routing switched off: the ceiling of what several workers can do, with wrong answers.

A session that a worker does not know has the count 0, so that it does all the work of a right answer.
"""

from typing import ClassVar

from fastapi import Request

from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer


class UnroutedCounter(StatefulCounterResourcesServer):
    """Leaves each request to the worker that happens to receive it."""

    routes_sessions: ClassVar[bool] = False

    def _count_of(self, request: Request) -> int:
        session_id = request.session[SESSION_ID_KEY]
        count = self._counters.setdefault(session_id, 0)
        self._counters.move_to_end(session_id)
        return count


if __name__ == "__main__":
    UnroutedCounter.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = UnroutedCounter.run_webserver()
