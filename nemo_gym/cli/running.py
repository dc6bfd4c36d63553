"""Finds the deployment that `--no-serve` means, and asks it for its configuration."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from omegaconf import DictConfig

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.deployment import running_deployments
from nemo_gym.errors import UsageError
from nemo_gym.server_utils import ServerClient


def running_config(head_url: str | None) -> DictConfig:
    """Return the configuration of a running deployment.

    Args:
        head_url: Its head server; when None, that of the only deployment, or of the only one that was started in
            this folder. Blocks.

    Raises:
        UsageError: No deployment is running, several are, or the address is none.
        ServerNotFoundError: The head server does not answer, or something else does.
    """
    url = head_url or _only_deployment()
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise UsageError(f"--head-server {url}: expected an address such as http://127.0.0.1:11000")
    return ServerClient.load_from_global_config(BaseServerConfig(host=host, port=port)).global_config_dict


def _only_deployment() -> str:
    found = running_deployments()
    if not found:
        raise UsageError(
            "no deployment is running\nStart one with `gym env start`, or leave out --no-serve and the servers are "
            "started for this run."
        )
    here = [record for record in found if record.working_dir == str(Path.cwd())]
    chosen = found if len(found) == 1 else here
    if len(chosen) != 1:
        known = "\n".join(f"  --head-server {record.head_url} (in {record.working_dir})" for record in found)
        raise UsageError(f"several deployments are running; say which:\n{known}")
    return chosen[0].head_url
