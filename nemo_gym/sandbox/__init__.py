"""Sandboxes: where environments run what a model wrote. docs/sandboxes.md says what each provider isolates."""

from nemo_gym.errors import (
    SandboxCreateError as SandboxCreateError,
    SandboxError as SandboxError,
    SandboxFileError as SandboxFileError,
    SandboxFileNotFoundError as SandboxFileNotFoundError,
    SandboxStoppedError as SandboxStoppedError,
)
from nemo_gym.sandbox.config import (
    resolve_provider_config as resolve_provider_config,
    resolve_provider_metadata as resolve_provider_metadata,
)
from nemo_gym.sandbox.providers.registry import (
    create_provider as create_provider,
    get_provider_class as get_provider_class,
    list_providers as list_providers,
    register_provider as register_provider,
)
from nemo_gym.sandbox.sandbox import AsyncSandbox as AsyncSandbox
from nemo_gym.sandbox.spec import (
    SandboxExecResult as SandboxExecResult,
    SandboxHandle as SandboxHandle,
    SandboxResources as SandboxResources,
    SandboxSpec as SandboxSpec,
    SandboxStatus as SandboxStatus,
)
from nemo_gym.sandbox.utils import (
    CPU_CAP_ENV_VARS as CPU_CAP_ENV_VARS,
    cpu_cap_env as cpu_cap_env,
    rewrite_image as rewrite_image,
)
