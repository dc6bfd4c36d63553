"""What a server imports at its start although nothing needs it yet: what stands behind a `LazyModule`.

Without this the first call or question for figures would import it on the event loop, and each worker by itself what
the template has imported for all of them.
"""

from nemo_gym.server import owner_calls as owner_calls
from nemo_gym.session_routing import aiohttp_ways as aiohttp_ways
