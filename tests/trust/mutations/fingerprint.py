"""What an engine's fingerprint is made of, so that equal keys are equal bytes, and which engines
are left alone or refused."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "identity": (*PYTEST, "tests/unit/connectors/test_vllm_identity.py"),
        "layout": (
            *PYTEST,
            "tests/unit/connectors/test_vllm_layout.py",
            "tests/unit/connectors/test_vllm_prefix_caching.py",
        ),
        "old folder": (*PYTEST, "tests/unit/connectors/test_old_folder.py"),
    },
    (
        # ---- context parallelism ---
        Mutant(
            "layout._group",
            "if sharers > 1 and spec.dcp_sharded:\n    ...",
            "",
            "a block that ranks divide is taken for one of a part of its tokens",
        ),
        Mutant(
            "layout.replicas",
            "ContextRanks.of(vllm_config.parallel_config).decode > 1",
            "False",
            "ranks that divide a block share the part of one",
        ),
        Mutant(
            "layout.divided",
            "{'interleave': int(parallel.cp_kv_cache_interleave_size)}",
            "{}",
            "engines that divide blocks in other turns share chunks",
        ),
        Mutant(
            "layout._of_all_ranks",
            "[*stage, *silent * (copies - 1)]",
            "stage",
            "a chunk counts as written when half of the ranks have told",
        ),
        # ---- identity ---
        Mutant(
            "identity.identity",
            "str(model.dtype)",
            "''",
            "engines of two types share chunks",
        ),
        Mutant(
            "identity.identity",
            "str(model.quantization)",
            "''",
            "a quantised engine shares chunks with one that is not",
        ),
        Mutant(
            "identity.identity",
            "str(cache.cache_dtype)",
            "''",
            "two types of KV cache share chunks",
        ),
        Mutant(
            "identity.identity",
            "[parallel.tensor_parallel_size, parallel.pipeline_parallel_size]",
            "[parallel.pipeline_parallel_size]",
            "engines of two tensor parallel sizes share chunks",
        ),
        Mutant(
            "identity._model",
            "getattr(media, 'mm_processor_kwargs', None)",
            "None",
            "two ways of preparing images share chunks",
        ),
        Mutant(
            "identity.identity",
            "[_model(one) for one in models]",
            "[]",
            "two configurations of one checkpoint share chunks",
        ),
        Mutant(
            "identity._without_folders",
            "name != _NAME or not os.path.isdir(str(inner))",
            "name != _NAME",
            "what older versions wrote of a multimodal model is not found any more",
        ),
        Mutant(
            "identity._without_folders",
            "{name: _without_folders(inner) for name, inner in value.items() if name != "
            "_NAME or not os.path.isdir(str(inner))}",
            "{name: _without_folders(inner) for name, inner in value.items()}",
            "the chunks of a draft model are lost when its folder moves",
        ),
        Mutant(
            "identity._models",
            "(vllm_config.model_config, draft)",
            "(vllm_config.model_config,)",
            "two draft models share chunks",
        ),
        Mutant(
            "identity._weights",
            "if files:\n    ...",
            "if True:\n    ...",
            "checkpoints without local files share chunks",
        ),
        Mutant(
            "identity._files",
            "getattr(model, 'model_weights', '') or load_format not in _FROM_FOLDER",
            "load_format not in _FROM_FOLDER",
            "streamed weights are named by other files",
        ),
        Mutant(
            "identity._files",
            "getattr(model, 'model_weights', '') or load_format not in _FROM_FOLDER",
            "getattr(model, 'model_weights', '')",
            "weights that a loader makes up are named by files it does not read",
        ),
        Mutant(
            "identity._weights",
            "[rank.weights for _, rank in sorted(ranks.items())]",
            "[ranks[0, 0].weights]",
            "weights that differ on another rank only share chunks",
        ),
        Mutant(
            "identity._unknown",
            "any((rank.weights is None for rank in ranks.values()))",
            "all((rank.weights is None for rank in ranks.values()))",
            "weights that one rank cannot read are held to be known",
        ),
        Mutant(
            "identity._weights",
            "_source(model)",
            "''",
            "two places whose samples agree share chunks",
        ),
        Mutant(
            "identity._source",
            "f\"{getattr(model, 'model_weights', '') or model.model} (revision {model.revision})\"",
            "f\"{getattr(model, 'model_weights', '') or model.model}\"",
            "two revisions whose samples agree share chunks",
        ),
        Mutant(
            "identity.identity",
            "found | {'start': start_word(unknown)} if unknown else found",
            "found",
            "weights that nobody can read are held to be known",
        ),
        Mutant(
            "identity.start_word",
            "secrets.token_hex(16)",
            "'start'",
            "starts of an engine whose weights nobody can read share chunks",
        ),
        Mutant(
            "identity._unknown",
            "getattr(vllm_config.cache_config, 'calculate_kv_scales', False)",
            "False",
            "starts whose first prompts gave other KV scales share chunks",
        ),
        Mutant(
            "identity._unknown",
            "any((rank.model is None for rank in ranks.values()))",
            "False",
            "layers that cannot be looked at are held to be known",
        ),
        Mutant(
            "identity.files_digest",
            "max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1)",
            "0",
            "checkpoints that begin alike share chunks",
        ),
        Mutant(
            "identity.files_digest",
            "f'{file.name}\\x00{size}\\x00'",
            "f'{size}\\x00'",
            "shards in another order share chunks",
        ),
        # ---- layout ---
        Mutant(
            "layout.chunk_layout",
            "rank.model",
            "None",
            "rotary tables that the longest prompt decides share chunks",
        ),
        Mutant(
            "layout.chunk_layout",
            "rank.description",
            "''",
            "blocks that are packed in two ways share chunks",
        ),
        # ---- engines that are left alone ---
        Mutant(
            "prefix_caching._of_engine",
            "vllm_config.model_config.use_mla",
            "False",
            "MLA on a CPU goes on from prefixes that its kernels compute otherwise",
        ),
        Mutant(
            "prefix_caching._of_model",
            "any((getattr(spec, 'non_causal', False) for spec in specs))",
            "False",
            "a prefix LM answers wrong",
        ),
        Mutant(
            "prefix_caching._of_model",
            "not model.is_prefix_caching_supported",
            "False",
            "a hit ends the engine of a model that pools over all tokens",
        ),
        Mutant(
            "prefix_caching._of_engine",
            "envs.VLLM_BATCH_INVARIANT",
            "False",
            "a hit changes bits where none may change",
        ),
        Mutant(
            "worker._of_group",
            "layer not in group.layers",
            "False",
            "every group copies all layers",
        ),
        Mutant(
            "HostsOf.of",
            "parallel.nnodes_within_dp",
            "parallel.nnodes",
            "one engine a host is refused as if it were on several",
        ),
    ),
)
