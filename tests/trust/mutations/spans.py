"""Documents from other prompts: what is moved where, and that nothing of it stays."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_SPANS = "connectors/vllm/scheduler_side/spans.py"
_PLAN = "spans/plan.py"
_ROTATION = "gpu/rotation.py"

ROOM = Room(
    {
        "plan": (*PYTEST, "tests/unit/spans"),
        "moved": (*PYTEST, "tests/unit/gpu/test_moved_tokens.py"),
        "scheduler": (*PYTEST, "tests/unit/connectors/test_vllm_spans.py"),
    },
    (
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "prompt.chain is None or prompt.blended or",
            "prompt.chain is None or",
            "blended KV is saved under exact keys",
        ),
        Mutant(
            _SPANS,
            "if not _resalt(request):",
            "if False:",
            "an exact request finds blended blocks in vLLM's own cache",
        ),
        Mutant(
            _SPANS,
            "if len(before) == len(after) and not set(before) & set(after):",
            "if len(before) == len(after):",
            "a vLLM that does not heed a new salt blends all the same",
        ),
        Mutant(
            _SPANS,
            "chain = self._layout.chain(extra, {})",
            'chain = self._layout.chain(b"", {})',
            "homes of another tenant are served",
        ),
        Mutant(
            _SPANS,
            "if why := self.why_not or _why_not(request):",
            "if why := _why_not(request):",
            "documents are moved without the operator's word",
        ),
        Mutant(
            _SPANS,
            "                pending.prompt.load_failed = True\n",
            "",
            "a load that fails is promised again without end",
        ),
        Mutant(
            _PLAN,
            "        if begin > reach:\n            break\n",
            "",
            "tokens of a hole are taken from nowhere",
        ),
        Mutant(
            _PLAN,
            "begin - span.begin + anchor",
            "begin - span.begin",
            "a document is taken from where the anchor lies",
        ),
        Mutant(
            _ROTATION,
            "        if distance < 0:\n            sin = -sin\n",
            "        sin = -sin\n",
            "keys are rotated backwards",
        ),
        Mutant(
            _ROTATION,
            "return bool(gap <= allowed * other.float().abs().max())",
            "return True",
            "a wrong rotation passes its check",
        ),
        Mutant(
            _ROTATION,
            "        if gap > 1e-2:\n",
            "        if gap > 1e9:\n",
            "a model is moved whose rotations do not add up",
        ),
    ),
)
