"""The identity of an SGLang engine: what decides its KV bytes besides the pool's pages.

All of SGLang's resolved server arguments are part of it but for :data:`DOES_NOT`. Weights, drafts,
adapters and scales are named by the content of their files. Where that is unknown the identity has
a random word: such a cache serves this start of the engine and no other.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as LateError
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvtier.connectors.vllm.identity import DIGESTS, Walk, local, start_word
from kvtier.connectors.vllm.naming.digests import DigestError, content_files, has_weights
from kvtier.connectors.vllm.naming.fields import ENVIRONMENT_DOES_NOT, FAMILIES, OF_OTHERS
from kvtier.core.processes import environment

_DIGEST_WAIT_S = 120.0
_FROM_FOLDER = re.compile(
    "auto|pt|safetensors|npcache|sharded_state|gguf|bitsandbytes|mistral|layered|fastsafetensors"
    "|runai_streamer"
)
"""SGLang's load formats that read the model's own folder."""
_PACKAGES = ("sglang", "torch", "transformers", "triton", "sglang-kernel", "flashinfer-python")
_PLACES = {
    "model_path": "revision",
    "speculative_draft_model_path": "speculative_draft_model_revision",
    **dict.fromkeys(
        ["uno_lora_path", "quantization_param_path", "speculative_token_map", "kt_weight_path"], ""
    ),
}
"""Arguments that name a folder or file whose content decides, and their revisions'."""
_VARIABLES = re.compile("SGLANG_|SGL_|" + FAMILIES.pattern)
_VARIABLES_DO_NOT = re.compile(
    "SGLANG_(RUN_ID|PORT|CACHE_DIR|TORCH_PROFILER_DIR"
    r"|(HICACHE|TEST|LOG|TRACE|DISAGG|DISAGGREGATION|GRPC)_\w+)|" + OF_OTHERS.pattern
)
_TABLE = {
    "It says where SGLang is reached, what it tells, and how long it waits.": """
    host port nccl_port dist_timeout dist_init_addr gated_launch_port node_rank nnodes numa_node
    fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads sidecar sidecar_args
    skip_server_warmup warmups enable_http2 http2_max_concurrent_streams ssl_keyfile ssl_certfile
    http2_initial_connection_window_size ssl_ca_certs ssl_keyfile_password enable_ssl_refresh
    api_key admin_api_key served_model_name enable_cache_report return_input_ids return_output_ids
    log_level log_level_http log_requests log_requests_level log_requests_format crash_dump_folder
    log_requests_target uvicorn_access_log_exclude_prefixes show_time_cost enable_metrics
    smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers stat_loggers
    load_snapshot_publish_interval tokenizer_metrics_custom_labels_header extra_metric_labels
    tokenizer_metrics_allowed_custom_labels bucket_time_to_first_token bucket_e2e_request_latency
    bucket_inter_token_latency prompt_tokens_buckets generation_tokens_buckets decode_log_interval
    gc_warning_threshold_secs gc_threshold enable_request_time_stats_logging kv_events_config
    load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id enable_trace
    forward_pass_metrics_ipc_name trace_modules otlp_traces_endpoint otlp_service_name
    export_metrics_to_file export_metrics_to_file_dir watchdog_timeout soft_watchdog_timeout
    sleep_on_idle custom_sigquit_handler base_gpu_id gpu_id_step use_ray stream_interval
    batch_notify_size grpc_response_timeout_secs enable_http_worker_reuseport mooncake_ib_device
    disaggregation_bootstrap_port disaggregation_ib_device engine_info_bootstrap_port""",
    "It decides tokens, media or the answer, and tokens are in the name.": """
    tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
    skip_tokenizer_init chat_template trust_request_chat_template hf_chat_template_name
    completion_template file_storage_path reasoning_parser default_chat_template_kwargs
    strip_thinking_cache enable_strict_thinking tool_call_parser tool_server sampling_defaults
    preferred_sampling_params allow_auto_truncate stream_response_default_include_usage
    incremental_streaming_output random_seed constrained_json_whitespace_pattern sampling_backend
    constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt grammar_backend
    enable_custom_logit_processor sampling_mask_max_tokens disable_outlines_disk_cache
    enable_response_store""",
    "It is a length, a budget, a place for memory, or the order of requests.": """
    context_length mem_fraction_static max_running_requests max_queued_requests max_total_tokens
    max_prefill_tokens chunked_prefill_size cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_bs_decode cuda_graph_bs_prefill schedule_policy enable_priority_scheduling
    disable_priority_preemption default_priority_value abort_on_priority_when_disabled dp_size
    schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy
    schedule_conservativeness radix_eviction_policy radix_eviction_policy_config download_dir
    _radix_eviction_policy_explicitly_set scheduler_recv_interval load_balance_method""",
    "It is HiCache's: what of it decides is told of each pool.": """
    page_size enable_hierarchical_cache hicache_host_memory_mode hicache_host_memory_fraction
    hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
    hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
    hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts""",
    "It says where a model is found: the content of its files is named.": """
    model_path revision speculative_draft_model_path speculative_draft_model_revision lora_paths
    uno_lora_path quantization_param_path""",
}
DOES_NOT: Mapping[str, str] = {
    name: reason for reason, names in _TABLE.items() for name in names.split()
}
"""SGLang's server arguments that do not decide a chunk's bytes -> why. All others do, also those
that a newer SGLang adds."""


def identity(arguments: Mapping[str, Any], changed: str = "") -> dict[str, Any]:
    """The identity, as JSON. Blocks for two minutes at most, while files are read for the first
    time. ``arguments``: SGLang's. ``changed``: why the weights are not those of the files."""
    walk, whys = Walk(), [changed] if changed else []
    told = {name: value for name, value in arguments.items() if name not in DOES_NOT}
    files = _digests(arguments, whys)
    found: dict[str, Any] = {
        "arguments": {name: walk.plain(value, f"--{name}") for name, value in told.items()},
        "software": dict(_versions()),
        "device": _device(),
        "environment": _environment(),
        "files": files,
    }
    whys += walk.unnamed
    return found | {"start": start_word(whys[0])} if whys else found


def _digests(arguments: Mapping[str, Any], whys: list[str]) -> dict[str, str]:
    """Digests of what the arguments name. ``whys`` gets why one is unknown."""
    found = dict[str, str]()
    load_format = str(getattr(arguments.get("load_format"), "value", arguments.get("load_format")))
    if not _FROM_FOLDER.fullmatch(load_format):
        whys.append(f"weights of --load-format {load_format} are in no file that kvtier can read")
        return found
    for name, path, revision in _named(arguments):
        try:
            found[name] = _digest(path, revision, is_model=name == "model_path")
        except (DigestError, OSError) as error:
            whys.append(str(error))
        except LateError:
            whys.append(f"the files of {path} were not read within {_DIGEST_WAIT_S:.0f} s")
    if arguments.get("trust_remote_code") and not whys:
        place = local(str(arguments["model_path"]), arguments.get("revision"))
        assert place is not None
        if re.search(r'"[\w./-]+--', (place / "config.json").read_text("utf-8")):
            whys.append("the model's code is that of another repository")
    return found


def _named(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """Name, path and revision of each place whose content decides."""
    for name, revision in _PLACES.items():
        if arguments.get(name):
            yield name, str(arguments[name]), arguments.get(revision)
    adapters = arguments.get("lora_paths") or ()
    adapters = adapters.values() if isinstance(adapters, Mapping) else adapters
    for number, one in enumerate(adapters):
        told = one.get("lora_path") if isinstance(one, Mapping) else getattr(one, "lora_path", one)
        yield f"adapter {number}", str(told).rpartition("=")[2], None


def _digest(path: str, revision: str | None, *, is_model: bool) -> str:
    place = local(path, revision)
    if place is None:
        raise DigestError(f"{path} is no local file, and not in the hub's cache")
    files = content_files(place, configured=False)
    if is_model and not has_weights(files):
        raise DigestError(f"{path} has no weights")
    for file in files:
        if os.stat(file).st_ctime > _started():
            raise DigestError(f"{file} has changed since the engine started")
    return DIGESTS.begin(files, place).result(_DIGEST_WAIT_S)


def _started() -> float:
    """When this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - since


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield name, version(name)


def _device() -> str:
    if torch.cuda.is_available():
        return "cuda {}.{}".format(*torch.cuda.get_device_capability())
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment().items())
        if _VARIABLES.match(name)
        and name not in ENVIRONMENT_DOES_NOT
        and not _VARIABLES_DO_NOT.fullmatch(name)
    }
