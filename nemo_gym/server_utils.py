"""The name under which environments know what servers share: everything here stands in `nemo_gym.server`."""

from nemo_gym.config_types import BaseServerConfig as BaseServerConfig
from nemo_gym.global_config import (
    get_first_server_config_dict as get_first_server_config_dict,
    get_global_config_dict as get_global_config_dict,
)
from nemo_gym.server.base import BaseServer as BaseServer, SimpleServer as SimpleServer
from nemo_gym.server.bootstrap import is_nemo_gym_fastapi_entrypoint as is_nemo_gym_fastapi_entrypoint
from nemo_gym.server.client import (
    ServerClient as ServerClient,
    close_client as close_client,
    close_client as global_aiohttp_client_exit,  # noqa: F401
    get_response_json as get_response_json,
    get_server_url as get_server_url,
    raise_for_status as raise_for_status,
    request as request,
)
from nemo_gym.server.head import HeadServer as HeadServer
from nemo_gym.server.middleware import SESSION_ID_KEY as SESSION_ID_KEY
