"""What an engine's fingerprint is made of, so that equal keys are equal bytes, and which engines
are left alone or refused."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "identity": (
            *PYTEST,
            "tests/unit/connectors/test_vllm_identity.py",
            "tests/unit/connectors/test_naming_fields.py",
            "tests/unit/connectors/test_naming_digests.py",
        ),
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
            "Walk.of",
            "place in DOES_NOT or _is_off(place, value, config, self._dtype)",
            "True",
            "engines of two types, quantizations or layouts share chunks",
        ),
        Mutant(
            "Walk.of",
            "if place not in DECIDES:\n    ...",
            "if place not in DECIDES:\n    continue",
            "what a newer vLLM is configured with is held not to decide",
        ),
        Mutant(
            "identity._is_off",
            "bool(value == default) or (place == 'lora_config.lora_dtype' and value in "
            "('auto', dtype))",
            "True",
            "adapters of two configurations share chunks",
        ),
        Mutant(
            "identity.without_folders",
            "name not in _OF_A_FOLDER",
            "True",
            "chunks are lost when the model's folder moves",
        ),
        Mutant(
            "identity._environment",
            "name not in ENVIRONMENT_DOES_NOT",
            "False",
            "engines of two kernels share chunks",
        ),
        Mutant(
            "identity._models",
            "(own, draft)",
            "(own,)",
            "two draft models share chunks",
        ),
        Mutant(
            "identity._folder",
            "getattr(model, 'model_weights', '') or load_format not in _FROM_FOLDER",
            "load_format not in _FROM_FOLDER",
            "streamed weights are named by other files",
        ),
        Mutant(
            "identity._folder",
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
            "identity._weights",
            "any((rank.weights is None for rank in ranks.values()))",
            "all((rank.weights is None for rank in ranks.values()))",
            "weights that one rank cannot read are held to be known",
        ),
        Mutant(
            "identity._weights",
            "{'from': _source(model), 'loaded': [rank.weights for _, rank in "
            "sorted(ranks.items())]}",
            "{'loaded': [rank.weights for _, rank in sorted(ranks.items())]}",
            "two places whose weights agree share chunks",
        ),
        Mutant(
            "identity._source",
            "f\"{getattr(model, 'model_weights', '') or model.model} (revision {model.revision})\"",
            "f\"{getattr(model, 'model_weights', '') or model.model}\"",
            "two revisions whose weights agree share chunks",
        ),
        Mutant(
            "identity._begun",
            "place in _AT_LOAD and _AT_LOAD[place] != _stamp(files)",
            "False",
            "weights that were replaced during the start name those that run",
        ),
        Mutant(
            "identity.identity",
            "found | {'start': start_word(whys[0])} if whys else found",
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
            "identity.identity",
            "getattr(vllm_config.cache_config, 'calculate_kv_scales', False)",
            "False",
            "starts whose first prompts gave other KV scales share chunks",
        ),
        Mutant(
            "identity.identity",
            "any((rank.model is None for rank in ranks.values()))",
            "False",
            "layers that cannot be looked at are held to be known",
        ),
        Mutant(
            "identity._foreign_code",
            "name != model.model",
            "False",
            "code of another repository is held to be known",
        ),
        Mutant(
            "FileDigests._read",
            "digest.update(view[:count])",
            "digest.update(view[:64])",
            "checkpoints that differ in the middle share chunks",
        ),
        Mutant(
            "FileDigests._read",
            "_identity(os.fstat(descriptor)) != _identity(before)",
            "False",
            "a file that is replaced while it is read is named by halves",
        ),
        Mutant(
            "FileDigests._kept",
            "str(digest) if is_whole and is_same else ''",
            "str(digest)",
            "a file that was replaced keeps its old name",
        ),
        Mutant(
            "FileDigests._digest",
            "begun - max(before.st_mtime, before.st_ctime) >= _SETTLED_S",
            "True",
            "a file that changes twice within a tick keeps its first name",
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
