"""The log of a server's processes: what each needs to know of the configuration to write its lines without secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from omegaconf import OmegaConf

from nemo_gym.errors import NemoGymError
from nemo_gym.global_config import (
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    get_first_server_config_dict,
    maybe_get_global_config_dict,
    secrets_in,
)
from nemo_gym.logs import set_up_process_log
from nemo_gym.server.secrets import session_secrets
from nemo_gym.server.worker_env import WorkerEnv


def set_up_server_log() -> None:
    """Give this process of a server its log, as its configuration says.

    What is wrong with that is for whoever reads it next to say: in a log.
    """
    name = os.environ.get(NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME) or "server"
    settings: Mapping[str, Any] = {}
    secrets: set[str] = set()
    is_worker = WorkerEnv.read() is not None
    is_main = False
    with suppress(NemoGymError):
        config = maybe_get_global_config_dict()
        if config is not None:
            found = OmegaConf.to_container(config, resolve=True)
            assert isinstance(found, dict)
            settings = {str(key): value for key, value in found.items()}
            secrets |= secrets_in(config)
            secrets.update(session_secrets(settings))
            is_main = not is_worker and (get_first_server_config_dict(config, name).get("num_workers") or 1) > 1
    # A worker learns later which one it is.
    set_up_process_log(name, "main" if is_main else None, settings, secrets)
