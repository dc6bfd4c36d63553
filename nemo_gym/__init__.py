"""nemo_gym: reinforcement-learning environments as HTTP servers.

Import what you need from its module: `nemo_gym.base_resources_server`, `nemo_gym.base_responses_api_agent`,
`nemo_gym.base_responses_api_model`, `nemo_gym.openai_utils`, `nemo_gym.rollout_collection`.
"""

from pathlib import Path

from nemo_gym.paths import PARENT_DIR as PARENT_DIR

__version__ = "0.1.0"

CACHE_DIR = Path.home() / ".cache" / "nemo_gym"
RESULTS_DIR = PARENT_DIR / "results"
