"""What chunks are named by besides the engine: tokens, adapters, salts and media."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_REQUESTS = "connectors/vllm/scheduler_side/requests.py"

ROOM = Room(
    {
        "names": (
            *PYTEST,
            "tests/unit/core/test_chunk.py",
            "tests/unit/connectors/test_vllm_requests.py",
        ),
    },
    (
        # ---- chunk ---
        Mutant(
            "core/chunk.py",
            '                update(struct.pack("<I", len(more)) + more)',
            "                update(more)",
            "an image's name that goes on like another's tokens is taken for it",
        ),
        Mutant(
            "core/chunk.py",
            'struct.pack("<I?I", layout.chunk_tokens, framed, len(extra))',
            'struct.pack("<I?I", layout.chunk_tokens, framed, 0)',
            "a salt that goes on like another's media is taken for it",
        ),
        Mutant(
            "core/chunk.py",
            'struct.pack("<I?I", layout.chunk_tokens, framed, len(extra))',
            'struct.pack("<I?I", 0, framed, len(extra))',
            "engines with chunks of two sizes share keys",
        ),
        Mutant(
            "core/chunk.py",
            "self._per_chunk.get(done + index, b",
            "self._per_chunk.get(index, b",
            "a prompt that grows has the media of its first chunks again",
        ),
        Mutant(
            "core/chunk.py",
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
    ),
)
