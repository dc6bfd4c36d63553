"""Several workers, one session: every request reaches the worker that created its session.

Usable by any Starlette or FastAPI application. It knows ASGI, cookies, tokens and sockets, and nothing of the
servers of nemo_gym. docs/sessions-and-workers.md tells the story with pictures.
"""

from nemo_gym.session_routing.body_field import (
    BodyIdField as BodyIdField,
    BodyIdProblem as BodyIdProblem,
    unreadable_body_reply as unreadable_body_reply,
)
from nemo_gym.session_routing.front import FrontedApp as FrontedApp
from nemo_gym.session_routing.held_sessions import Placement as Placement
from nemo_gym.session_routing.install import install_session_routing as install_session_routing
from nemo_gym.session_routing.jsonrpc import jsonrpc_error_reply as jsonrpc_error_reply
from nemo_gym.session_routing.lost import (
    SESSION_LOST_HEADER as SESSION_LOST_HEADER,
    LostReason as LostReason,
    lost_session_reply as lost_session_reply,
)
from nemo_gym.session_routing.ownership import (
    SESSION_OWNER_KEY as SESSION_OWNER_KEY,
    SessionOwnerMiddleware as SessionOwnerMiddleware,
    TokenHeader as TokenHeader,
    read_token_header as read_token_header,
    route_path as route_path,
)
from nemo_gym.session_routing.private_socket import (
    SOCKET_DIR_ENV as SOCKET_DIR_ENV,
    create_socket_dir as create_socket_dir,
    is_listening as is_listening,
    remove_socket_dir as remove_socket_dir,
    sweep_stale_socket_dirs as sweep_stale_socket_dirs,
    worker_socket_path as worker_socket_path,
)
from nemo_gym.session_routing.router import (
    RoutingStatistics as RoutingStatistics,
    SessionRoutingMiddleware as SessionRoutingMiddleware,
)
from nemo_gym.session_routing.session_cookie import (
    SessionCookieMiddleware as SessionCookieMiddleware,
    SessionCookies as SessionCookies,
)
