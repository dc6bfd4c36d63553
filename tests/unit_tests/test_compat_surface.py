"""The names that existing environments import."""

from __future__ import annotations

import importlib

import pytest

# Module and names, most used first; what environments written for NeMo Gym take from these modules.
SURFACE = {
    "nemo_gym": "PARENT_DIR CACHE_DIR RESULTS_DIR",
    "nemo_gym.server_utils": (
        "ServerClient raise_for_status get_response_json SESSION_ID_KEY is_nemo_gym_fastapi_entrypoint request"
        " get_first_server_config_dict get_server_url BaseServerConfig SimpleServer BaseServer HeadServer"
        " get_global_config_dict global_aiohttp_client_exit"
    ),
    "nemo_gym.base_resources_server": (
        "BaseVerifyResponse BaseVerifyRequest BaseResourcesServerConfig SimpleResourcesServer BaseRunRequest"
        " BaseSeedSessionRequest BaseSeedSessionResponse AggregateMetricsRequest AggregateMetrics ReverifyMode"
        " NeMoGymResponse NEMO_GYM_MCP_METADATA_KEY NEMO_GYM_MCP_SESSION_TOKEN_HEADER"
    ),
    "nemo_gym.mcp_auto_exposure": (
        "maybe_auto_expose session_token_serializer TOKEN_HEADER NEMO_GYM_MCP_SESSION_TOKEN_HEADER normalize_tool_name"
    ),
    "nemo_gym.sandbox": (
        "AsyncSandbox SandboxSpec SandboxResources SandboxExecResult SandboxHandle SandboxStatus SandboxCreateError"
        " create_provider register_provider get_provider_class list_providers resolve_provider_config"
        " resolve_provider_metadata rewrite_image"
    ),
    "nemo_gym.sandbox.config": "resolve_provider_config resolve_provider_metadata",
    "nemo_gym.sandbox.providers": "create_provider",
    "nemo_gym.sandbox.providers.base": "SandboxExecResult SandboxSpec SandboxCreateError",
    "nemo_gym.sandbox.providers.local": "LocalProvider",
    "nemo_gym.sandbox.providers.registry": "create_provider",
    "nemo_gym.sandbox.utils": "cpu_cap_env CPU_CAP_ENV_VARS rewrite_image",
    "nemo_gym.base_responses_api_agent": (
        "SimpleResponsesAPIAgent BaseResponsesAPIAgentConfig Body AggregateMetricsRequest get_first_server_config_dict"
    ),
    "nemo_gym.base_responses_api_model": "SimpleResponsesAPIModel BaseResponsesAPIModelConfig Body",
    "nemo_gym.config_types": (
        "ModelServerRef ResourcesServerRef AgentServerRef AggregateMetricsRequest AggregateMetrics BaseServerConfig"
        " DatasetConfig Domain OmegaConf"
    ),
    "nemo_gym.openai_utils": (
        "NeMoGymResponse NeMoGymResponseCreateParamsNonStreaming NeMoGymResponseOutputMessage "
        "NeMoGymEasyInputMessage NeMoGymResponseOutputText NeMoGymResponseFunctionToolCall "
        "NeMoGymFunctionCallOutput NeMoGymResponseReasoningItem NeMoGymResponseUsage "
        "NeMoGymChatCompletionCreateParamsNonStreaming NeMoGymSummary NeMoGymChatCompletion "
        "NeMoGymResponseInputTokensDetails NeMoGymResponseOutputTokensDetails accumulate_response_usage "
        "NeMoGymResponseOutputItem NeMoGymAsyncOpenAI NeMoGymResponseOutputMessageForTraining "
        "NeMoGymResponseOutputRefusal NeMoGymChatCompletionMessage NeMoGymChoice NeMoGymResponseInput "
        "NeMoGymMessage NeMoGymResponseInputItem"
    ),
    "nemo_gym.global_config": (
        "get_global_config_dict ROLLOUT_INDEX_KEY_NAME TASK_INDEX_KEY_NAME get_first_server_config_dict"
        " GlobalConfigDictParser GlobalConfigDictParserConfig AGENT_REF_KEY_NAME find_open_port"
        " maybe_get_global_config_dict DictConfig OmegaConf"
    ),
    "nemo_gym.reward_profile": (
        "compute_pass_majority_metrics highest_k_metrics compute_subset_metrics compute_aggregate_metrics"
    ),
    "nemo_gym.responses_converter": "ResponsesConverter VLLMConverter",
    "nemo_gym.rollout_collection": "RolloutCollectionConfig RolloutCollectionHelper get_global_config_dict",
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in SURFACE.items() for name in names.split()]
)
def test_the_name_can_be_imported(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)
