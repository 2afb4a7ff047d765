"""Two tables of vLLM's configuration: what decides the bytes of a chunk, and what does not.

Every field of every object in a ``VllmConfig`` of the tested versions is in exactly one of them.
Whatever is in neither, as in a newer vLLM, counts as if it decided: a cold cache, never a wrong
answer. Pure: no I/O, lock, thread, clock or log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_DECIDES = """
vllm_config: model_config cache_config parallel_config scheduler_config device_config load_config
    attention_config mamba_config kernel_config lora_config speculative_config diffusion_config
    compilation_config additional_config optimization_level performance_mode
model_config: runner convert trust_remote_code dtype hf_config is_submodel_config
    word_embeddings_untied_by_checkpoint code_revision quantization quantization_config
    override_attention_dtype enforce_eager disable_sliding_window model_class_overrides model_impl
    multimodal_config
multimodal_config: language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize
    mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method
quantization_config: linear moe ignore targets
linear: weight activation
moe: weight activation
cache_config: kv_cache_layout cache_dtype is_attention_free sliding_window calculate_kv_scales
    kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode
    enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm use_kda_recoverssm
    kv_sharing_fast_prefill swa_bounded_replay
parallel_config: pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size
    decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    dcp_comm_backend dcp_q_replicate enable_hc_sp enable_expert_parallel enable_eplb eplb_config
    expert_placement_strategy all2all_backend disable_custom_all_reduce worker_cls sd_worker_cls
eplb_config: num_redundant_experts policy
scheduler_config: runner_type
device_config: device_type
load_config: load_format model_loader_extra_config ignore_patterns
attention_config: backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
    flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
    tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization
    mla_prefill_backend use_prefill_query_quantization use_prefill_decode_attention
    use_fp4_indexer_cache indexer_kv_dtype indexer_sparse_logits hisparse_config use_non_causal
    sparse_mla_force_mqa trtllm_ragged_backend minimax_m3_indexer_cp flex_attn_block_m
    flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size indexer_tp_shard_min_rows
mamba_config: backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm
kernel_config: ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
    moe_backend enable_bf16x3_router_gemm sparse_indexer_topk_backend linear_backend
    linear_backend_per_quant monokernel
ir_op_priority: rms_norm fused_add_rms_norm gelu_and_mul_sparse
lora_config: max_lora_rank fully_sharded_loras lora_dtype target_modules default_mm_loras
    enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras
speculative_config: num_speculative_tokens method draft_tensor_parallel_size tensor_parallel_size
    quantization moe_backend attention_backend kv_cache_dtype code_revision enforce_eager
    index_share_for_mtp_iteration use_local_argmax_reduction use_heterogeneous_vocab
    parallel_drafting draft_model_config draft_parallel_config draft_load_config dspark_draft_topk
    draft_lm_head_quantization
diffusion_config: canvas_length max_denoising_steps
compilation_config: mode backend custom_ops ir_enable_torch_wrap compile_mm_encoder
    inductor_compile_config inductor_passes use_inductor_graph_partition pass_config
    dynamic_shapes_config
pass_config: fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops enable_sp
    fuse_gemm_comms fuse_allreduce_rms enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla
    fuse_act_padding fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache
    fuse_minimax_qk_norm
dynamic_shapes_config: type assume_32_bit_indexing
"""

_DOES_NOT = {
    "It says what is reported, logged or profiled, or when a start or a stop gives up.": """
vllm_config: observability_config logging_config profiler_config kv_events_config watchdog_config
    shutdown_timeout instance_id
""",
    "It works on the logits or on the answer, after the keys and values are there.": """
vllm_config: structured_outputs_config reasoning_config watermark_config aux_output_config
model_config: return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
    enable_return_routed_experts generation_config override_generation_config logits_processors
    io_processor_plugin pooler_config seed
speculative_config: rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
    enable_adaptive_verification draft_sample_method suffix_decoding_max_tree_depth
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_min_token_prob prompt_lookup_max prompt_lookup_min xpress_topc fly_window_size
    fly_entropy_threshold fly_entropy_top_k num_speculative_tokens_per_batch_size
    disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes
lora_config: max_lora_cls_labels
""",
    "It says where tensors lie or how they travel, not what is in them.": """
vllm_config: offload_config engram_config weight_transfer_config kv_transfer_config
    ec_transfer_config ec_manager_config
cache_config: kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks
parallel_config: data_parallel_size data_parallel_size_local data_parallel_rank
    data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port dp_sync_interval
    data_parallel_master_port data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_index enable_batch_sharded_sampling
    enable_ep_weight_filter max_parallel_loading_workers enable_shm_tensor_arena enable_elastic_ep
    elastic_ep_max_dp_size disable_nccl_for_dp_synchronization ray_workers_use_nsight
    ray_runtime_env placement_group distributed_executor_backend master_addr master_port node_rank
    nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
    distributed_timeout_seconds cpu_distributed_timeout_seconds rank _data_parallel_master_port_list
    _coord_store_port _api_process_count _api_process_rank _allow_auto_resolve_cp_interleave_size
    enable_fault_tolerance fault_tolerance_config
device_config: device
load_config: download_dir safetensors_load_strategy safetensors_prefetch_num_threads
    safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
model_config: enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
    sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator
multimodal_config: mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
    mm_tensor_ipc mm_ipc_gpu_memory_gb
eplb_config: use_async communicator enable_migration_batching
""",
    "It is a length, a budget, a number of sequences or blocks, or the order of requests.": """
model_config: max_model_len spec_target_max_model_len renderer_num_workers disable_cascade_attn
multimodal_config: limit_per_prompt skip_mm_profiling
cache_config: block_size user_specified_block_size gpu_memory_utilization num_gpu_blocks_override
    enable_prefix_caching prefix_match_unit prefix_caching_hash_algo
    prefix_cache_retention_interval num_gpu_blocks num_cpu_blocks effective_attention_block_size
    kv_cache_size_tokens kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens
    kv_cache_memory_bytes mamba_block_size user_specified_mamba_block_size _block_size_resolved
parallel_config: enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
eplb_config: window_size step_interval log_balancedness log_balancedness_interval
scheduler_config: max_num_batched_tokens max_num_scheduled_tokens max_num_seqs
    max_num_active_seqs max_num_partial_prefills max_long_partial_prefills
    long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs
    max_num_queued_tokens enable_chunked_prefill is_multimodal_model max_num_encoder_input_tokens
    encoder_cache_size policy disable_chunked_mm_input scheduler_cls
    disable_hybrid_kv_cache_manager scheduler_reserve_full_isl watermark
    prefill_schedule_interval async_scheduling stream_interval
attention_config: sparse_mla_prefill_workspace_factor
speculative_config: max_model_len
lora_config: max_loras max_cpu_loras specialize_active_lora
""",
    "It says where a model is found or what it is called: the content of its files is named.": """
model_config: model model_weights hf_config_path config_format revision served_model_name hf_token
    hf_overrides hf_text_config allow_deprecated_quantization
speculative_config: model revision
""",
    "It decides tokens, media or who may send them, and these are in the names themselves.": """
model_config: tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
    allowed_local_media_path allowed_media_domains enable_prompt_embeds
multimodal_config: enable_mm_embeds interleave_mm_strings mm_hasher_algorithm
    allow_missing_mm_embeddings
""",
    "It adds calls to the workers, and weights that one of them replaces are noticed.": """
parallel_config: worker_extension_cls
""",
    "It follows from what is named, or each rank tells it of its own tensors.": """
vllm_config: quant_config
cache_config: mamba_page_size_padded skip_page_size_padded
parallel_config: is_moe_model world_size
speculative_config: target_model_config target_parallel_config
compilation_config: enabled_custom_ops disabled_custom_ops traced_files static_forward_context
    static_all_moe_layers
""",
    "It says what a start compiles, captures, warms up, writes or times.": """
multimodal_config: mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
kernel_config: enable_cutedsl_warmup enable_jit_warmup
compilation_config: debug_dump_path cache_dir compile_cache_save_format splitting_ops
    cudagraph_mm_encoder encoder_cudagraph_token_budgets
    encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch
    cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
    compile_sizes compile_ranges_endpoints cudagraph_mode cudagraph_num_of_warmups
    cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora
    max_cudagraph_capture_size local_cache_dir fast_moe_cold_start compilation_time
    encoder_compilation_time
pass_config: rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb sp_min_token_num
dynamic_shapes_config: evaluate_guards
hisparse_config: device_buffer_size eager_host_mirror
""",
}

FILES = {"multimodal_config.mm_encoder_fp8_scale_path"}
"""Fields, as ``section.field``, that are paths of files whose content decides."""
SECTIONS = {
    "draft_model_config": "model_config",
    "draft_parallel_config": "parallel_config",
    "draft_load_config": "load_config",
}


def _table(text: str) -> frozenset[str]:
    found = set[str]()
    for section, fields in re.findall(r"^(\w+):((?:.|\n(?!\w+:))*)", text, re.MULTILINE):
        found |= {f"{section}.{field}" for field in fields.split()}
    return frozenset(found)


DECIDES = _table(_DECIDES)
"""Fields, as ``section.field``, that decide the bytes of a chunk. Objects inside are walked."""
DOES_NOT: Mapping[str, str] = {
    name: reason for reason, text in _DOES_NOT.items() for name in _table(text)
}
"""Fields, as ``section.field``, that do not decide -> why."""

# ---- environment ---------------------------------------------------------------------------------

FAMILIES = re.compile(
    r"(AITER|ATEN|CUBLAS|CUDNN|DNNL|FLASHINFER|FLASH_ATT|HIPBLAS|MIOPEN|MKL|NVIDIA_TF32|ONEDNN"
    r"|PYTORCH|TORCH|TRITON|VLLM_|XFORMERS|[KQV]_SCALE_CONSTANT)"
)
"""Pattern of how variables of vLLM, and of the libraries that have its kernels, begin."""
_VLLM_DOES_NOT = """
    DISABLE_SHARED_EXPERTS_STREAM
    DIST_IDENT SNAPSHOT_TIMEOUT_S PRECOMPILED_WHEEL_LOCATION MORIIO_TRANSFER_TIMEOUT_S
    ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
    ALLOW_INSECURE_SERIALIZATION ALLOW_LONG_MAX_MODEL_LEN ALLOW_RUNTIME_LORA_UPDATING API_KEY
    ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN AUDIO_FETCH_TIMEOUT BEAM_ALWAYS_CONSTRAIN_OUTPUT
    BUILD_COMMIT BUILD_PIPELINE BUILD_URL CACHE_ROOT CHAT_TEMPLATE_FUEL
    CHAT_TEMPLATE_RENDER_TIMEOUT CI_USE_S3 COMPILE_CACHE_SAVE_FORMAT COMPUTE_NANS_IN_LOGITS
    CONFIGURE_LOGGING CONFIG_ROOT CPU_CI_ENV CPU_KVCACHE_SPACE CPU_NUM_OF_RESERVED_CPU
    CPU_OMP_THREADS_BIND CUDA_COMPATIBILITY_PATH CUSTOM_SCOPES_FOR_PROFILING DEBUG_DUMP_PATH
    DEBUG_LOG_API_SERVER_RESPONSE DEBUG_MFU_METRICS DEBUG_WORKSPACE DEEPEP_BUFFER_SIZE_MB
    DEEP_GEMM_WARMUP DISABLE_COMPILE_CACHE DISABLE_LOG_LOGO DISABLE_REQUEST_ID_RANDOMIZATION
    DOCKER_BUILD_CONTEXT DO_NOT_TRACK DP_MASTER_IP DP_MASTER_PORT DP_RANK DP_RANK_LOCAL DP_SIZE
    EC_SIDE_CHANNEL_HOST EC_SIDE_CHANNEL_PORT ELASTIC_EP_DRAIN_REQUESTS
    ELASTIC_EP_SCALE_UP_LAUNCH ENABLE_COHERE_API ENABLE_CUDAGRAPH_GC ENABLE_RESPONSES_API_STORE
    ENABLE_STARTUP_PLAN ENABLE_V1_MULTIPROCESSING ENFORCE_STRICT_TOOL_CALLING
    ENGINE_ITERATION_TIMEOUT_S ENGINE_READY_TIMEOUT_S EXECUTE_MODEL_TIMEOUT_SECONDS
    FASTSAFETENSORS_QUEUE_SIZE FLASHINFER_AUTOTUNE_CACHE_DIR FLASHINFER_WORKSPACE_BUFFER_SIZE
    FORCE_AOT_LOAD GC_DEBUG GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS GPT_OSS_SYSTEM_TOOL_MCP_LABELS
    GPU_NIC_PCIE_MAPPING GPU_SYNC_CHECK HAS_FLASHINFER_CUBIN HOST_IP HTTP_MAX_REQUEST_BODY_SIZE
    HTTP_TIMEOUT_KEEP_ALIVE IMAGE_FETCH_TIMEOUT IMAGE_TAG KEEP_ALIVE_ON_ENGINE_DEATH
    KV_EVENTS_USE_INT_BLOCK_HASHES KV_OFFLOAD_MAX_BATCH_DESCRIPTORS LOGGING_COLOR
    LOGGING_CONFIG_PATH LOGGING_LEVEL LOGGING_PREFIX LOGGING_STREAM LOG_BATCHSIZE_INTERVAL
    LOG_MODEL_INSPECTION LOG_STATS_INTERVAL LOOPBACK_IP LORA_RESOLVER_CACHE_DIR
    LORA_RESOLVER_HF_REPO_LIST MAIN_CUDA_VERSION MAX_AUDIO_CLIP_FILESIZE_MB
    MAX_AUDIO_DECODE_BYTES MAX_AUDIO_DECODE_DURATION_S MAX_AUDIO_PREPROCESS_WORKERS
    MAX_BAD_WORDS_TOTAL_TOKENS MAX_COMPLETION_PROMPTS MAX_EMBED_DECODE_BYTES MAX_IMAGE_PIXELS
    MAX_MEDIA_DOWNLOAD_SIZE_MB MAX_MEDIA_REQUEST_DECODE_BYTES MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB
    MAX_NUM_BAD_WORDS MAX_N_SEQUENCES MAX_STOP_STRINGS MEDIA_CACHE MEDIA_CACHE_MAX_SIZE_MB
    MEDIA_CACHE_TTL_HOURS MEDIA_CONNECTOR MEDIA_FETCH_MAX_RETRIES MEDIA_LOADING_THREAD_COUNT
    MEDIA_URL_ALLOW_REDIRECTS MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS MM_HASHER_ALGORITHM
    MODEL_REDIRECT_PATH MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_BOOTSTRAP_PORT
    MOONCAKE_CONNECTOR_TIMEOUT MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_LOAD_RECV_THREADS
    MOONCAKE_STORE_TIER_LOG MQ_MAX_CHUNK_BYTES_MB MSGPACK_ZERO_COPY_THRESHOLD NCCL_INCLUDE_PATH
    NIC_SELECTION_VARS NIXL_EP_MAX_NUM_RANKS NIXL_SIDE_CHANNEL_HOST NIXL_SIDE_CHANNEL_PORT
    NO_USAGE_STATS NVTX_SCOPES_FOR_PROFILING OBJECT_STORAGE_SHM_BUFFER_NAME
    P2P_HANDSHAKE_TIMEOUT_S P2P_IDLE_TIMEOUT_S P2P_MAX_PEERS P2P_SIDE_CHANNEL_HOST
    P2P_SIDE_CHANNEL_PORT PATTERN_MATCH_DEBUG PORT PREFIX_CACHE_RETENTION_INTERVAL
    PROCESS_NAME_PREFIX RAISE_ON_LOGIT_NANS RANDOMIZE_DP_DUMMY_INPUTS RAY_BUNDLE_INDICES
    RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS RAY_EXTRA_ENV_VARS_TO_COPY
    RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY RAY_PER_WORKER_GPUS REGEX_COMPILATION_TIMEOUT_S
    REQUEST_BODY_LOG_LEVEL RINGBUFFER_WARNING_INTERVAL ROCM_SLEEP_MEM_CHUNK_SIZE RPC_BASE_PATH
    RUST_FRONTEND_PATH SERVER_DEV_MODE SKIP_MODEL_NAME_VALIDATION
    SKIP_PRECOMPILED_VERSION_SUFFIX SKIP_VERSION_SUFFIX SYSTEM_START_DATE TARGET_DEVICE
    TOOL_JSON_ERROR_AUTOMATIC_RETRY TOOL_PARSE_REGEX_TIMEOUT_SECONDS TRACE_FUNCTION
    TRITON_JIT_WARMUP_NUM_THREADS USAGE_SOURCE USAGE_STATS_SERVER
    USE_EXPERIMENTAL_PARSER_CONTEXT USE_FASTOKENS USE_FLASHINFER_SAMPLER USE_MODELSCOPE
    USE_PRECOMPILED USE_PRECOMPILED_RUST USE_RAY_COMPILED_DAG_CHANNEL_TYPE
    USE_RAY_COMPILED_DAG_OVERLAP_COMM USE_RAY_V2_EXECUTOR_BACKEND USE_RAY_WRAPPED_PP_COMM
    USE_RUST_BENCH USE_RUST_FRONTEND USE_SIMPLE_KV_OFFLOAD USE_SPINLOOP_EXT USE_V2_MODEL_RUNNER
    V1_OUTPUT_PROC_CHUNK_SIZE V1_USE_OUTLINES_CACHE VIDEO_FETCH_TIMEOUT VIDEO_LOADER_BACKEND
    WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY WEIGHT_OFFLOADING_DISABLE_UVA WORKER_MULTIPROC_METHOD
    WORKER_SHUTDOWN_TIMEOUT_SECONDS WSL2_ENABLE_PIN_MEMORY XGRAMMAR_CACHE_MB XLA_CACHE_PATH
    XLA_CHECK_RECOMPILATION XPU_USE_SAMPLER_KERNEL
"""
_LIBRARIES_DO_NOT = """
    AITER_SITUV2_A4W4 AITER_SITUV2_A8W4 PYTORCH_NVML_BASED_CUDA_CHECK
    TORCHINDUCTOR_CPP_DYNAMIC_THREADS TRITON_CACHE_AUTOTUNING MKL_DYNAMIC MKL_NUM_THREADS
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_VERSION
    TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_COMPILE_THREADS TORCH_CPP_LOG_LEVEL
    TORCH_CUDA_ARCH_LIST TORCH_DEVICE_BACKEND_AUTOLOAD TORCH_DISTRIBUTED_DEBUG
    TORCH_EXTENSIONS_DIR TORCH_HOME TORCH_LOGS TORCH_SHOW_CPP_STACKTRACES TORCH_TRACE
    TORCH_VERSION TRITON_CACHE_DIR TRITON_HOME FLASHINFER_CUBIN_DIR FLASHINFER_WORKSPACE_BASE
"""
ENVIRONMENT_DOES_NOT = {
    *(f"VLLM_{name}" for name in _VLLM_DOES_NOT.split()),
    *_LIBRARIES_DO_NOT.split(),
}
"""Variables that decide nothing: places, addresses, secrets, threads, logs, limits of requests,
what fields above say as well, and what vLLM's import sets in some processes only."""
OF_OTHERS = re.compile(r".*(_SERVICE_HOST|_SERVICE_PORT\w*|_PORT|_PORT_\d+_\w+)|TORCH_(NCCL|FR)_.*")
"""Pattern of names that a cluster gives every container, and those of a library of messages."""
