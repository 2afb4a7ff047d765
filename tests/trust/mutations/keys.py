"""What chunks are named by besides the engine: tokens, adapters, salts and media."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "names": (
            *PYTEST,
            "tests/unit/core/test_chunk.py",
            "tests/unit/connectors/test_vllm_requests.py",
            "tests/unit/connectors/test_naming_media.py",
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
            "media.media_parts",
            "(name, position.offset)",
            "('', position.offset)",
            "two images at one place share chunks",
        ),
        Mutant(
            "media.media_parts",
            "(name, position.offset)",
            "(name, 0)",
            "one image at two places shares chunks",
        ),
        Mutant(
            "media.media_parts",
            "position.offset + max(1, position.length) - 1",
            "position.offset",
            "a chunk that an image ends in is named without it",
        ),
        Mutant(
            "media.media_parts",
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
            "media.digest_of",
            "str(digest.hexdigest())",
            "'same'",
            "pictures that vLLM or a client calls alike share chunks",
        ),
        Mutant(
            "MediaNames.name",
            "known.has_two or known.digest != digest",
            "known.has_two",
            "a picture is named by its content where the model gets another one",
        ),
        Mutant(
            "MediaNames.name",
            "f'{self._start} {feature.identifier}'",
            "feature.identifier",
            "media that cannot be read have lasting names",
        ),
        Mutant(
            "Adapters.found",
            "known.stamp != now and (not known.changed)",
            "False",
            "an adapter's change is not seen",
        ),
        Mutant(
            "Adapters.found",
            "known is None or (lora.load_inplace and known.stamp != now)",
            "known is None",
            "an adapter that was loaded anew is named by its old content",
        ),
        Mutant(
            "requests.adapter_folder",
            "Path(path).expanduser()",
            "Path(path)",
            "an adapter under the home folder has no lasting name",
        ),
        Mutant(
            "requests.adapter_folder",
            "not constants.HF_HUB_OFFLINE",
            "False",
            "an adapter that the hub may replace has a lasting name",
        ),
        Mutant(
            "requests._asks_not_to",
            "(request.kv_transfer_params or {}).get(CACHE, True) is not True",
            "(request.kv_transfer_params or {}).get(CACHE, True) is False",
            "a request that asks in other words not to be kept is kept",
        ),
    ),
)
