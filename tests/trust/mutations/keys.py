"""What chunks are named by besides the engine: tokens, adapters, salts and media."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

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
            "KeyChain._go_on",
            "struct.pack('<I', len(more)) + more",
            "more",
            "an image's name that goes on like another's tokens is taken for it",
        ),
        Mutant(
            "KeyChain.__init__",
            "len(extra)",
            "0",
            "a salt that goes on like another's media is taken for it",
        ),
        Mutant(
            "KeyChain.__init__",
            "struct.pack('<I?I', layout.chunk_tokens, framed, len(extra))",
            "struct.pack('<I?I', 0, framed, len(extra))",
            "engines with chunks of two sizes share keys",
        ),
        Mutant(
            "KeyChain._go_on",
            "done + index",
            "index",
            "a prompt that grows has the media of its first chunks again",
        ),
        Mutant(
            "KeyChain._go_on",
            "own[:_LINK_BYTES]",
            "_ROOT_LINK",
            "every chunk is a prompt's first to a tier",
        ),
        # ---- requests ---
        Mutant(
            "requests.request_extra",
            "{'lora': adapter, 'salt': salt}",
            "{'lora': adapter}",
            "tenants with two salts share chunks under one adapter",
        ),
        Mutant(
            "requests.request_extra",
            "{'lora': adapter, 'salt': salt}",
            "{'salt': salt}",
            "two adapters share chunks",
        ),
        Mutant(
            "requests.media_extra",
            "feature.identifier",
            "''",
            "two images at one place share chunks",
        ),
        Mutant(
            "requests.media_extra",
            "(feature.identifier, position.offset)",
            "(feature.identifier, 0)",
            "one image at two places shares chunks",
        ),
        Mutant(
            "requests.media_extra",
            "position.offset + max(1, position.length) - 1",
            "position.offset",
            "a chunk that an image ends in is named without it",
        ),
        Mutant(
            "requests.media_extra",
            "position.offset + max(1, position.length) - 1",
            "position.offset + position.length",
            "a chunk behind an image is named as if the image were in it, and is missed",
        ),
        Mutant(
            "requests.request_extra",
            "getattr(request, 'prompt_embeds', None) is not None",
            "False",
            "prompts given as embeddings share the chunks of no tokens",
        ),
        Mutant(
            "requests.request_extra",
            "lora is not None and adapter is None",
            "False",
            "an adapter that changed under the engine is served",
        ),
        Mutant(
            "Adapters.identity",
            "known[0] != stamp and known[1] is not None",
            "False",
            "an adapter's change is not seen",
        ),
        Mutant(
            "Adapters.identity",
            "known is None or lora.load_inplace",
            "known is None",
            "an adapter that was loaded anew is named by its old content",
        ),
        Mutant(
            "requests.request_extra",
            "(request.kv_transfer_params or {}).get(CACHE, True) is not True",
            "(request.kv_transfer_params or {}).get(CACHE, True) is False",
            "a request that asks in other words not to be kept is kept",
        ),
    ),
)
