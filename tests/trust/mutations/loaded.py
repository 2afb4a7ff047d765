"""What a worker tells of its loaded model, and that it notices replaced weights."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {"loaded": (*PYTEST, "tests/unit/connectors/test_loaded_model.py")},
    (
        # ---- loaded ---
        Mutant(
            "loaded.rotary_facts",
            "{'class': type(module).__qualname__, 'plain': _plain(module), 'tables': tables}",
            "{'class': type(module).__qualname__, 'tables': tables}",
            "LongRoPE engines of two lengths share chunks",
        ),
        Mutant(
            "loaded.rotary_facts",
            "{'class': type(module).__qualname__, 'plain': _plain(module), 'tables': tables}",
            "{'class': type(module).__qualname__, 'plain': _plain(module)}",
            "other rotary tables share chunks",
        ),
        Mutant(
            "loaded.rotary_facts",
            "facts if tables else facts | {'longest': longest}",
            "facts if True else facts | {'longest': longest}",
            "rotary tables that cannot be read are held to be known",
        ),
        Mutant(
            "loaded.content",
            "words.split(_BLOCK_WORDS)",
            "words[:16].split(_BLOCK_WORDS)",
            "tables that differ late share chunks",
        ),
        Mutant(
            "loaded.attention_facts",
            "{'layer': _plain(layer), 'kernel': _plain(getattr(layer, 'impl', None)), "
            "'buffers': buffers}",
            "{'layer': _plain(layer), 'buffers': buffers}",
            "two windows, caps or scales share chunks",
        ),
        Mutant(
            "loaded.attention_facts",
            "{'layer': _plain(layer), 'kernel': _plain(getattr(layer, 'impl', None)), "
            "'buffers': buffers}",
            "{'layer': _plain(layer), 'kernel': _plain(getattr(layer, 'impl', None))}",
            "two scales of K and V share chunks",
        ),
        Mutant(
            "loaded.models_with",
            "not wanted or not wanted <= seen",
            "not wanted",
            "layers outside the modules that were found are held to be known",
        ),
        Mutant(
            "loaded.weights_digest",
            "return None",
            "continue",
            "weights that a kernel has taken away are held to be known",
        ),
        Mutant(
            "_note_loads.noted",
            "self._loaded = True",
            "",
            "weights that vLLM loads into a running engine are not noticed",
        ),
        Mutant(
            "WeightWatch._differs",
            "_place(parameter) != (address, version)",
            "_place(parameter)[0] != address",
            "weights that are written in place are not noticed",
        ),
        Mutant(
            "WeightWatch._differs",
            "_place(parameter) != (address, version)",
            "_place(parameter)[1] != version",
            "weights that another tensor replaces are not noticed",
        ),
        Mutant(
            "WeightWatch._differs",
            "now != b''.join((self._elements[index] for index in chosen))",
            "False",
            "weights that are written past torch's counting are not noticed",
        ),
        Mutant(
            "WeightWatch._differs",
            "chosen.stop if chosen.stop < len(self._seen) else 0",
            "0",
            "weights of later layers are never compared",
        ),
    ),
)
