"""Documents from other prompts: what is moved where, and that nothing of it stays."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_SPANS = "extensions/spans/scheduler_half.py"
_PLAN = "extensions/spans/plan.py"
_ROTATION = "extensions/spans/rotation.py"
_MOVED = "extensions/spans/mover.py"
_ROTARY = "extensions/spans/rotary.py"
_WORKER = "connectors/vllm/worker_side/worker.py"

ROOM = Room(
    {
        "plan": (
            *PYTEST,
            "tests/unit/extensions/spans/test_plan.py",
            "tests/unit/extensions/spans/test_prompts.py",
        ),
        "moved": (
            *PYTEST,
            "tests/unit/extensions/spans/test_moved_tokens.py",
            "tests/unit/extensions/spans/test_vllm_moved.py",
        ),
        "scheduler": (*PYTEST, "tests/unit/extensions/spans/test_vllm_spans.py"),
        "passes": (*PYTEST, "tests/unit/extensions/spans/test_vllm_span_passes.py"),
        "in place": (*PYTEST, "tests/unit/extensions/spans/test_vllm_in_place.py"),
    },
    (
        Mutant(
            _MOVED,
            '    if getattr(vllm_config, "use_v2_model_runner", False):\n',
            "    if False:\n",
            "tokens are moved under a runner with which that has not run",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "prompt.chain is None or prompt.progress.blended or",
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
            "connectors/vllm/scheduler_side/prompts.py",
            "layout.chain(extra, media)",
            'layout.chain(b"", media)',
            "homes of another tenant are served",
        ),
        Mutant(
            _SPANS,
            "if why := self.why_not or _why_not(prompt):",
            "if why := _why_not(prompt):",
            "documents are moved without the operator's word",
        ),
        Mutant(
            _SPANS,
            "every if plan.row else ready",
            "every",
            "homes are waited for that take longer to come than to compute",
        ),
        Mutant(
            _SPANS,
            "exact = self._known(keys, ask=False)",
            "exact = self._known(keys)",
            "a shared tier that may have the prompt itself keeps homes from being used",
        ),
        Mutant(
            _SPANS,
            "                self._is_checked = True\n",
            "                self._is_checked = False\n",
            "places for a check that all ranks have made are looked for at each request",
        ),
        Mutant(
            _SPANS,
            "                pending.prompt.progress.fail_load()\n",
            "",
            "a load that fails is promised again without end",
        ),
        Mutant(
            _PLAN,
            "        seam = 1 if at > reach else 0\n",
            "        seam = 0\n",
            "tokens of a hole are taken from nowhere",
        ),
        Mutant(
            _PLAN,
            "            runs.append(ComputedRun(reach, at, at + seam))\n",
            "            runs.append(ComputedRun(at, at, at + seam))\n",
            "of a hole only the token behind it is computed",
        ),
        Mutant(
            _PLAN,
            "        if tokens > most:\n",
            "        if False:\n",
            "a step computes a hole of any length in place",
        ),
        Mutant(
            _PLAN,
            "        if found and found[-1].end >= end:\n",
            "        if found:\n",
            "a promise ends in a hole, which nobody computes",
        ),
        Mutant(
            _PLAN,
            "min(span.end, span.begin + known - anchor)",
            "span.end",
            "a document of which only the beginning is there is loaded whole",
        ),
        Mutant(
            _SPANS,
            "            end = min(section.end, chunks * size + section.distance)\n",
            "            end = section.end\n",
            "chunks that did not come are loaded",
        ),
        Mutant(
            _SPANS,
            "        most = 0 if self.why_not_in_place else self._most_in_place\n",
            "        most = self._most_in_place\n",
            "a hole is left to workers that compute nothing in place",
        ),
        Mutant(
            _MOVED,
            "        if not self._agree(ready):\n",
            "        if not ready:\n",
            "a rank begins a pass that another one does not, and waits for it without end",
        ),
        Mutant(
            _WORKER,
            "            self._compute(order)  # also with other weights",
            "            if self._report.replacements:\n"
            "                self._ended(order, failed=True)\n"
            "            else:\n"
            "                self._compute(order)  # also with other weights",
            "a rank whose weights were replaced leaves the others waiting before a pass",
        ),
        Mutant(
            _MOVED,
            "if parallel.world_size != ranks or parallel.decode_context_parallel_size != 1:",
            "if False:",
            "ranks that keep parts of the tokens move them as if they kept all",
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
            _ROTARY,
            "known = LATENT_MODELS if all(is_latent(layer) for layer in layers) else MODELS",
            "known = LATENT_MODELS + MODELS",
            "of a model that expands its latents to heads the wrong part is rotated",
        ),
        Mutant(
            _MOVED,
            "return layer.qk_rope_head_dim, layer.kv_lora_rank",
            "return layer.kv_lora_rank, layer.qk_rope_head_dim",
            "latents are taken for rotated keys",
        ),
        Mutant(
            _ROTATION,
            "        if gap > 1e-2:\n",
            "        if gap > 1e9:\n",
            "a model is moved whose rotations do not add up",
        ),
        Mutant(
            _SPANS,
            "            if pending.done + pending.failed < self._jobs.ranks:\n"
            "                continue\n",
            "",
            "one rank computes in place while another copies, and they wait for each other",
        ),
        Mutant(
            _SPANS,
            "        if self._failures == _FAILURES:\n",
            "        if False:\n",
            "a pass that always fails is tried without end",
        ),
        Mutant(
            _SPANS,
            "                if pending.failed:\n                    pending.order.runs = []\n",
            "",
            "tokens are computed in place over KV that one rank does not have",
        ),
        Mutant(
            _WORKER,
            " or (isinstance(job, SpanJob) and job.goes_on):\n",
            ":\n",
            "a request runs before its first tokens are computed in place",
        ),
        Mutant(
            _MOVED,
            "if not self._rotation.explains(one, other, 0):",
            "if False:",
            "a pass over wrong tokens or positions is believed",
        ),
        Mutant(
            _MOVED,
            "self._writer(0)(torch.zeros_like(keys), torch.zeros_like(values), places)",
            "pass",
            "a pass that writes nothing is believed",
        ),
    ),
)
