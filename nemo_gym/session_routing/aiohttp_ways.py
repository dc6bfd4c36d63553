"""The ways to an owner that need aiohttp, behind one name: `forwarding` imports them late."""

from nemo_gym.session_routing.aiohttp_hop import AiohttpHop as AiohttpHop
from nemo_gym.session_routing.owner_pool import OwnerPool as OwnerPool
from nemo_gym.session_routing.websocket_hop import forward_websocket as forward_websocket
