"""What a worker tells of its loaded model, and that it notices replaced weights."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_LOADED = "connectors/vllm/worker_side/loaded.py"

ROOM = Room(
    {"loaded": (*PYTEST, "tests/unit/connectors/test_loaded_model.py")},
    (
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
            (
                "    return {\n"
                '        "layer": _plain(layer),\n'
                '        "kernel": _plain(getattr(layer, "impl", None)),\n'
                '        "buffers": buffers,\n'
                "    }\n"
            ),
            '    return {"layer": _plain(layer), "buffers": buffers}\n',
            "two windows, caps or scales share chunks",
        ),
        Mutant(
            _LOADED,
            (
                "    return {\n"
                '        "layer": _plain(layer),\n'
                '        "kernel": _plain(getattr(layer, "impl", None)),\n'
                '        "buffers": buffers,\n'
                "    }\n"
            ),
            '    return {"layer": _plain(layer), "kernel": _plain(getattr(layer, "impl", None))}\n',
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
