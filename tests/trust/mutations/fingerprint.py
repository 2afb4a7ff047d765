"""What an engine's fingerprint is made of, so that equal keys are equal bytes, and which engines
are left alone or refused."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_IDENTITY = "connectors/vllm/identity.py"
_LAYOUT = "connectors/vllm/layout.py"
_PREFIXES = "connectors/vllm/prefix_caching.py"

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
            _LAYOUT,
            "    if sharers > 1 and spec.dcp_sharded:\n        tokens *= sharers\n",
            "",
            "a block that ranks divide is taken for one of a part of its tokens",
        ),
        Mutant(
            _LAYOUT,
            "    if ContextRanks.of(vllm_config.parallel_config).decode > 1:\n        return False",
            "    if False:\n        return False",
            "ranks that divide a block share the part of one",
        ),
        Mutant(
            _LAYOUT,
            '    return {"interleave": int(parallel.cp_kv_cache_interleave_size)}\n',
            "    return {}\n",
            "engines that divide blocks in other turns share chunks",
        ),
        Mutant(
            _LAYOUT,
            "        every += [*stage, *silent * (copies - 1)]\n",
            "        every += stage\n",
            "a chunk counts as written when half of the ranks have told",
        ),
        # ---- identity ---
        Mutant(
            _IDENTITY,
            '        "dtype": str(model.dtype),\n',
            "",
            "engines of two types share chunks",
        ),
        Mutant(
            _IDENTITY,
            '        "quantization": str(model.quantization),\n',
            "",
            "a quantised engine shares chunks with one that is not",
        ),
        Mutant(
            _IDENTITY,
            '        "cache_dtype": str(cache.cache_dtype),\n',
            "",
            "two types of KV cache share chunks",
        ),
        Mutant(
            _IDENTITY,
            "[parallel.tensor_parallel_size, parallel.pipeline_parallel_size]",
            "[parallel.pipeline_parallel_size]",
            "engines of two tensor parallel sizes share chunks",
        ),
        Mutant(
            _IDENTITY,
            '{"config": config, "processor": getattr(media, "mm_processor_kwargs", None)}',
            '{"config": config}',
            "two ways of preparing images share chunks",
        ),
        Mutant(
            _IDENTITY,
            '        "models": [_model(one) for one in models],\n',
            "",
            "two configurations of one checkpoint share chunks",
        ),
        Mutant(
            _IDENTITY,
            "        if name != _NAME or not os.path.isdir(str(inner))\n",
            "        if name != _NAME\n",
            "what older versions wrote of a multimodal model is not found any more",
        ),
        Mutant(
            _IDENTITY,
            "        if name != _NAME or not os.path.isdir(str(inner))\n",
            "",
            "the chunks of a draft model are lost when its folder moves",
        ),
        Mutant(
            _IDENTITY,
            "for one in (vllm_config.model_config, draft) if",
            "for one in (vllm_config.model_config,) if",
            "two draft models share chunks",
        ),
        Mutant(
            _IDENTITY,
            "    if files:\n",
            "    if True:\n",
            "checkpoints without local files share chunks",
        ),
        Mutant(
            _IDENTITY,
            '    if getattr(model, "model_weights", "") or load_format not in _FROM_FOLDER:',
            "    if load_format not in _FROM_FOLDER:",
            "streamed weights are named by other files",
        ),
        Mutant(
            _IDENTITY,
            '    if getattr(model, "model_weights", "") or load_format not in _FROM_FOLDER:',
            '    if getattr(model, "model_weights", ""):',
            "weights that a loader makes up are named by files it does not read",
        ),
        Mutant(
            _IDENTITY,
            "[rank.weights for _, rank in sorted(ranks.items())]",
            "[ranks[0, 0].weights]",
            "weights that differ on another rank only share chunks",
        ),
        Mutant(
            _IDENTITY,
            "any(rank.weights is None for",
            "all(rank.weights is None for",
            "weights that one rank cannot read are held to be known",
        ),
        Mutant(
            _IDENTITY,
            '{"from": _source(model), "loaded"',
            '{"loaded"',
            "two places whose samples agree share chunks",
        ),
        Mutant(
            _IDENTITY,
            " (revision {model.revision})",
            "",
            "two revisions whose samples agree share chunks",
        ),
        Mutant(
            _IDENTITY,
            '    return found | {"start": start_word(unknown)} if unknown else found',
            "    return found",
            "weights that nobody can read are held to be known",
        ),
        Mutant(
            _IDENTITY,
            "    return secrets.token_hex(16)",
            '    return "start"',
            "starts of an engine whose weights nobody can read share chunks",
        ),
        Mutant(
            _IDENTITY,
            '    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):',
            "    if False:",
            "starts whose first prompts gave other KV scales share chunks",
        ),
        Mutant(
            _IDENTITY,
            "    if any(rank.model is None for rank in ranks.values()):",
            "    if False:",
            "layers that cannot be looked at are held to be known",
        ),
        Mutant(
            _IDENTITY,
            "max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1)",
            "0",
            "checkpoints that begin alike share chunks",
        ),
        Mutant(
            _IDENTITY,
            'digest.update(f"{file.name}\\0{size}\\0".encode())',
            'digest.update(f"{size}\\0".encode())',
            "shards in another order share chunks",
        ),
        # ---- layout ---
        Mutant(
            _LAYOUT,
            "                rank.model,\n",
            "",
            "rotary tables that the longest prompt decides share chunks",
        ),
        Mutant(
            "connectors/vllm/layout.py",
            "                rank.description,\n",
            "",
            "blocks that are packed in two ways share chunks",
        ),
        # ---- engines that are left alone ---
        Mutant(
            _PREFIXES,
            "    if vllm_config.model_config.use_mla:",
            "    if False:",
            "MLA on a CPU goes on from prefixes that its kernels compute otherwise",
        ),
        Mutant(
            _PREFIXES,
            '    if any(getattr(spec, "non_causal", False) for spec in specs):\n',
            "    if False:\n",
            "a prefix LM answers wrong",
        ),
        Mutant(
            _PREFIXES,
            "    if not model.is_prefix_caching_supported:\n",
            "    if False:\n",
            "a hit ends the engine of a model that pools over all tokens",
        ),
        Mutant(
            _PREFIXES,
            "    if envs.VLLM_BATCH_INVARIANT:\n",
            "    if False:\n",
            "a hit changes bits where none may change",
        ),
        Mutant(
            "connectors/vllm/worker_side/worker.py",
            "        if layer not in group.layers:\n",
            "        if False:\n",
            "every group copies all layers",
        ),
        Mutant(
            "connectors/vllm/hosts.py",
            "int(parallel.nnodes_within_dp)",
            "int(parallel.nnodes)",
            "one engine a host is refused as if it were on several",
        ),
    ),
)
