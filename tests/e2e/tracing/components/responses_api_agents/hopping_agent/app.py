"""The plain agent, whose session is looked at once from the worker that does not hold it: a hop in each rollout."""

from collections.abc import Mapping
from typing import Any

import aiohttp
from fastapi import HTTPException

from nemo_gym.conformance.replay import session_of
from nemo_gym.server.client import cookie_header
from nemo_gym.server.socket_records import read_socket_dir
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from nemo_gym.session_routing import SESSION_OWNER_KEY
from nemo_gym.session_routing.session_cookie import is_worker_id
from responses_api_agents.simple_agent.app import RolloutCookies, SimpleAgent


class HoppingAgent(SimpleAgent):
    """After the seed, asks another worker than the session's for the counter; fails where the row says so."""

    async def _seed(self, row: Mapping[str, Any], cookies: RolloutCookies) -> Any:
        if row.get("fails"):
            raise HTTPException(422, "what no trace tells")
        seeded = await super()._seed(row, cookies)
        server = self.config.resources_server.name
        settings = self.server_client.global_config_dict[server].resources_servers.example_session_state_mgmt
        folder = read_socket_dir(settings.host, settings.port)
        assert folder is not None
        owner = session_of(cookies.resources)[SESSION_OWNER_KEY]
        (other,) = (path for path in folder.iterdir() if is_worker_id(path.name) and path.name != owner)
        headers = {"Cookie": cookie_header(cookies.resources)}
        tracing = self.server_client.tracing
        assert tracing is not None
        path = "/get_counter_value"
        with tracing.call(server, "POST", path) as call:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(other))) as session,
                session.post(f"http://localhost{path}", json={}, headers={**headers, **call.headers}) as reply,
            ):
                call.answered(reply.status)
                reply.raise_for_status()
        return seeded


if __name__ == "__main__":
    HoppingAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = HoppingAgent.run_webserver()
