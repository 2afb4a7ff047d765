"""The identity of an SGLang engine: what decides its KV bytes besides the pool's pages.

All of SGLang's resolved server arguments are part of it but for :data:`DOES_NOT`. Weights, drafts,
adapters and scales are named by the content of their files. Where that is unknown the identity has
a random word: such a cache serves this start of the engine and no other.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvtier.connectors.vllm.identity import (
    FROM_FOLDER,
    Walk,
    files_digest,
    local,
    start_word,
    variables,
    versions,
)
from kvtier.connectors.vllm.naming.digests import DigestError, content_files, has_weights
from kvtier.connectors.vllm.naming.fields import FAMILIES, OF_OTHERS
from kvtier.connectors.vllm.worker_side.loaded import hardware

_PACKAGES = ("sglang", "torch", "transformers", "triton", "sglang-kernel", "flashinfer-python")
_PLACES = {
    "model_path": "revision",
    "speculative_draft_model_path": "speculative_draft_model_revision",
    **dict.fromkeys(("uno_lora_path", "quantization_param_path"), ""),
    **dict.fromkeys(("speculative_token_map", "kt_weight_path"), ""),
}
"""Arguments that name a folder or file whose content decides, and those with its revision."""
_VARIABLES = re.compile("SGLANG_|SGL_|" + FAMILIES.pattern)
_VARIABLES_DO_NOT = re.compile(
    "SGLANG_(RUN_ID|PORT|CACHE_DIR|TORCH_PROFILER_DIR"
    r"|(HICACHE|TEST|LOG|TRACE|DISAGG|DISAGGREGATION|GRPC)_\w+)|" + OF_OTHERS.pattern
)
_DOES_NOT = """
host port nccl_port dist_timeout dist_init_addr node_rank nnodes numa_node base_gpu_id gpu_id_step
grpc_mode grpc_port fastapi_root_path skip_server_warmup warmups enable_http2 ssl_keyfile
ssl_certfile ssl_ca_certs ssl_keyfile_password api_key admin_api_key served_model_name
enable_cache_report log_level log_level_http log_requests log_requests_level log_requests_format
log_requests_target crash_dump_folder show_time_cost enable_metrics extra_metric_labels
enable_metrics_for_all_schedulers decode_log_interval kv_events_config enable_trace
otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir
watchdog_timeout soft_watchdog_timeout sleep_on_idle stream_interval mooncake_ib_device
disaggregation_bootstrap_port disaggregation_ib_device engine_info_bootstrap_port
tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
skip_tokenizer_init chat_template hf_chat_template_name completion_template file_storage_path
reasoning_parser default_chat_template_kwargs tool_call_parser tool_server sampling_defaults
preferred_sampling_params allow_auto_truncate random_seed grammar_backend sampling_backend
enable_custom_logit_processor
mem_fraction_static max_running_requests max_queued_requests max_total_tokens max_prefill_tokens
chunked_prefill_size cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode
cuda_graph_bs_prefill schedule_policy enable_priority_scheduling schedule_conservativeness
radix_eviction_policy _radix_eviction_policy_explicitly_set dp_size download_dir load_balance_method
page_size enable_hierarchical_cache hicache_host_memory_mode hicache_host_memory_fraction
hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
model_path revision speculative_draft_model_path speculative_draft_model_revision lora_paths
uno_lora_path quantization_param_path
"""
DOES_NOT = frozenset(_DOES_NOT.split())
"""SGLang's server arguments that do not decide a chunk's bytes. All others do, also those that a
newer SGLang adds. In this order: where it is reached, what it tells and how long it waits; tokens,
media and answers (tokens are in the name); lengths, budgets, places for memory, and the order of
requests; HiCache's, of which each pool tells what decides; where a model is found, because its
files' content is named."""


def identity(arguments: Mapping[str, Any], *, replaced: int = 0) -> dict[str, Any]:
    """Make the identity, as JSON. Blocks for two minutes at most, while files are first read.
    ``arguments``: SGLang's. ``replaced``: how often the weights were, in this engine."""
    walk, whys = Walk(), ["weights were replaced in the running engine"] if replaced else []
    told = {name: value for name, value in arguments.items() if name not in DOES_NOT}
    found: dict[str, Any] = {
        "arguments": {name: walk.plain(value, f"--{name}") for name, value in told.items()},
        "software": versions(_PACKAGES),
        "device": hardware("cuda" if torch.cuda.is_available() else "cpu"),
        "environment": variables(_VARIABLES, _VARIABLES_DO_NOT),
    }
    try:
        found["files"] = dict(_digests(arguments))
    except (DigestError, OSError) as error:
        whys.append(str(error) or "the files were not read in time")
    whys += walk.unnamed
    return found | {"start": start_word(whys[0])} if whys else found


def _digests(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Digest the places that arguments name. DigestError or OSError if one is unknown."""
    load_format = str(getattr(arguments.get("load_format"), "value", arguments.get("load_format")))
    if load_format not in FROM_FOLDER:
        raise DigestError(
            f"weights of --load-format {load_format} are in no file that kvtier can read"
        )
    for name, path, revision in _named(arguments):
        if (place := local(path, revision)) is None:
            raise DigestError(f"{path} is no local file, and not in the hub's cache")
        files = content_files(place, configured=False)
        if name == "model_path" and not has_weights(files):
            raise DigestError(f"{path} has no weights")
        remote = name == "model_path" and arguments.get("trust_remote_code")
        if remote and re.search(r'"[\w./-]+--', (place / "config.json").read_text("utf-8")):
            raise DigestError("the model's code is that of another repository")
        if young := [file for file in files if os.stat(file).st_ctime > _started()]:
            raise DigestError(f"{young[0]} has changed since the engine started")
        yield name, files_digest(files)


def _named(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """Yield name, path and revision of each place whose content decides."""
    for name, revision in _PLACES.items():
        if arguments.get(name):
            yield name, str(arguments[name]), arguments.get(revision)
    adapters = arguments.get("lora_paths") or ()
    adapters = adapters.values() if isinstance(adapters, Mapping) else adapters
    for number, one in enumerate(adapters):
        told = one.get("lora_path") if isinstance(one, Mapping) else getattr(one, "lora_path", one)
        yield f"adapter {number}", str(told).rpartition("=")[2], None


def _started() -> float:
    """Return the time at which this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - since
