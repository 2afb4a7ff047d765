"""What chunks are named by: tokens, extras, media, the model's content and what its layers resolved to."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_IDENTITY = "connectors/vllm/identity.py"
_LAYOUT = "connectors/vllm/layout.py"
_LOADED = "connectors/vllm/loaded.py"
_REQUESTS = "connectors/vllm/requests.py"

ROOM = Room(
    {
        "names": (*PYTEST, "tests/unit/test_chunk.py", "tests/unit/test_vllm_requests.py"),
        "model": (*PYTEST, "tests/unit/test_loaded_model.py"),
        "fingerprint": (*PYTEST, "tests/unit/test_vllm_identity.py"),
    },
    (
        # ---- chunk ---
        Mutant(
            "chunk.py",
            '                update(struct.pack("<I", len(more)) + more)',
            "                update(more)",
            "an image's name that goes on like another's tokens is taken for it",
        ),
        Mutant(
            "chunk.py",
            'struct.pack("<I?I", layout.chunk_tokens, framed, len(extra))',
            'struct.pack("<I?I", layout.chunk_tokens, framed, 0)',
            "a salt that goes on like another's media is taken for it",
        ),
        Mutant(
            "chunk.py",
            'struct.pack("<I?I", layout.chunk_tokens, framed, len(extra))',
            'struct.pack("<I?I", 0, framed, len(extra))',
            "engines with chunks of two sizes share keys",
        ),
        Mutant(
            "chunk.py",
            "self._per_chunk.get(done + index, b",
            "self._per_chunk.get(index, b",
            "a prompt that grows has the media of its first chunks again",
        ),
        Mutant(
            "chunk.py",
            "            link = own[:_LINK_BYTES]",
            "            link = _ROOT_LINK",
            "every chunk is a prompt's first to a tier",
        ),
        # ---- requests ---
        Mutant(
            _REQUESTS,
            'json.dumps({"lora": adapter, "salt": salt}',
            'json.dumps({"lora": adapter}',
            "tenants with two salts share chunks under one adapter",
        ),
        Mutant(
            _REQUESTS,
            'json.dumps({"lora": adapter, "salt": salt}',
            'json.dumps({"salt": salt}',
            "two adapters share chunks",
        ),
        Mutant(
            _REQUESTS,
            "append((feature.identifier, position.offset))",
            'append(("", position.offset))',
            "two images at one place share chunks",
        ),
        Mutant(
            _REQUESTS,
            "append((feature.identifier, position.offset))",
            "append((feature.identifier, 0))",
            "one image at two places shares chunks",
        ),
        Mutant(
            _REQUESTS,
            "last = position.offset + max(1, position.length) - 1",
            "last = position.offset",
            "a chunk that an image ends in is named without it",
        ),
        Mutant(
            _REQUESTS,
            "last = position.offset + max(1, position.length) - 1",
            "last = position.offset + position.length",
            "a chunk behind an image is named as if the image were in it, and is missed",
        ),
        Mutant(
            _REQUESTS,
            '    if getattr(request, "prompt_embeds", None) is not None:',
            "    if False:",
            "prompts given as embeddings share the chunks of no tokens",
        ),
        Mutant(
            _REQUESTS,
            "    if lora is not None and adapter is None:",
            "    if False:",
            "an adapter that changed under the engine is served",
        ),
        Mutant(
            _REQUESTS,
            "        if known[0] != stamp and known[1] is not None:",
            "        if False:",
            "an adapter's change is not seen",
        ),
        Mutant(
            _REQUESTS,
            "known is None or lora.load_inplace",
            "known is None",
            "an adapter that was loaded anew is named by its old content",
        ),
        Mutant(
            _REQUESTS,
            "get(CACHE, True) is not True",
            "get(CACHE, True) is False",
            "a request that asks in other words not to be kept is kept",
        ),
        # ---- identity ---
        Mutant(_IDENTITY, '        "dtype": str(model.dtype),\n', "", "engines of two types share chunks"),
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
            "rank.description, rank.model]",
            "rank.description]",
            "rotary tables that the longest prompt decides share chunks",
        ),
        Mutant(
            _LAYOUT,
            "rank.block_bytes, rank.description,",
            "rank.block_bytes,",
            "blocks that are packed in two ways share chunks",
        ),
        Mutant(
            _LAYOUT,
            "    if vllm_config.model_config.use_mla:",
            "    if False:",
            "MLA on a CPU goes on from prefixes that its kernels compute otherwise",
        ),
        Mutant(
            _LAYOUT,
            "    if not ranks:",
            "    if False:",
            "beside another connector the start fails in words about bytes",
        ),
        # ---- loaded ---
        Mutant(
            _LOADED,
            '{"class": type(module).__qualname__, "plain": _plain(module), "tables": tables}',
            '{"class": type(module).__qualname__, "tables": tables}',
            "LongRoPE engines of two lengths share chunks",
        ),
        Mutant(
            _LOADED,
            '"plain": _plain(module), "tables": tables}',
            '"plain": _plain(module)}',
            "other rotary tables share chunks",
        ),
        Mutant(
            _LOADED,
            "facts if tables else facts | {",
            "facts if True else facts | {",
            "rotary tables that cannot be read are held to be known",
        ),
        Mutant(
            _LOADED,
            "starts = torch.tensor([last * run // (_RUNS - 1) for run in range(_RUNS)])",
            "starts = torch.zeros(_RUNS, dtype=torch.int64)",
            "tables that differ late share chunks",
        ),
        Mutant(
            _LOADED,
            '"kernel": _plain(getattr(layer, "impl", None)), ',
            "",
            "two windows, caps or scales share chunks",
        ),
        Mutant(
            _LOADED,
            ', "buffers": buffers}',
            "}",
            "two scales of K and V share chunks",
        ),
        Mutant(
            _LOADED,
            "    if not wanted or not wanted <= seen:",
            "    if not wanted:",
            "layers outside the modules that were found are held to be known",
        ),
        Mutant(
            _LOADED,
            "            if tensor.is_meta or not tensor.numel():\n                return None",
            "            if tensor.is_meta or not tensor.numel():\n                continue",
            "weights that a kernel has taken away are held to be known",
        ),
        Mutant(
            _LOADED,
            "            self._loaded = True\n",
            "",
            "weights that vLLM loads into a running engine are not noticed",
        ),
        Mutant(
            _LOADED,
            "_place(parameter) != (address, version):",
            "_place(parameter)[0] != address:",
            "weights that are written in place are not noticed",
        ),
        Mutant(
            _LOADED,
            "_place(parameter) != (address, version):",
            "_place(parameter)[1] != version:",
            "weights that another tensor replaces are not noticed",
        ),
        Mutant(
            _LOADED,
            '        return now != b"".join(self._elements[index] for index in chosen)',
            "        return False",
            "weights that are written past torch's counting are not noticed",
        ),
        Mutant(
            _LOADED,
            "        self._next = chosen.stop if chosen.stop < len(self._seen) else 0",
            "        self._next = 0",
            "weights of later layers are never compared",
        ),
    ),
)
