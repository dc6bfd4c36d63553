"""The counter with routing switched off: what every server with several workers would be without it."""

from typing import ClassVar

from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer


class UnroutedCounter(StatefulCounterResourcesServer):
    """Leaves each request to the worker that happens to accept it."""

    routes_sessions: ClassVar[bool] = False


if __name__ == "__main__":
    UnroutedCounter.run_webserver()
