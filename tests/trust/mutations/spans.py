"""Documents from other prompts: what is moved where, and that nothing of it stays."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

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
            "mover.mover_of",
            "getattr(vllm_config, 'use_v2_model_runner', False)",
            "False",
            "tokens are moved under a runner with which that has not run",
        ),
        Mutant(
            "SchedulerHalf._advance",
            "prompt.chain is None or prompt.progress.blended or (not self._duty.saves)",
            "prompt.chain is None or not self._duty.saves",
            "blended KV is saved under exact keys",
        ),
        Mutant(
            "Spans.new",
            "not _resalt(request)",
            "False",
            "an exact request finds blended blocks in vLLM's own cache",
        ),
        Mutant(
            "scheduler_half._resalt",
            "len(before) == len(after) and (not set(before) & set(after))",
            "len(before) == len(after)",
            "a vLLM that does not heed a new salt blends all the same",
        ),
        Mutant(
            "Prompt.name",
            "layout.chain(named.whole, named.media)",
            "layout.chain(b'', named.media)",
            "homes of another tenant are served",
        ),
        Mutant(
            "Spans.new",
            "self.why_not or _why_not(prompt)",
            "_why_not(prompt)",
            "documents are moved without the operator's word",
        ),
        Mutant(
            "Spans._claim",
            "every if plan.row else ready",
            "every",
            "homes are waited for that take longer to come than to compute",
        ),
        Mutant(
            "Spans._claim",
            "self._known(keys, ask=False)",
            "self._known(keys)",
            "a shared tier that may have the prompt itself keeps homes from being used",
        ),
        Mutant(
            "Spans.report",
            "self._is_checked = True",
            "self._is_checked = False",
            "places for a check that all ranks have made are looked for at each request",
        ),
        Mutant(
            "Spans.report",
            "pending.prompt.progress.fail_load()",
            "",
            "a load that fails is promised again without end",
        ),
        Mutant(
            "plan.runs_of",
            "1 if at > reach else 0",
            "0",
            "tokens of a hole are taken from nowhere",
        ),
        Mutant(
            "plan.runs_of",
            "ComputedRun(reach, at, at + seam)",
            "ComputedRun(at, at, at + seam)",
            "of a hole only the token behind it is computed",
        ),
        Mutant(
            "plan.bounded",
            "tokens > most",
            "False",
            "a step computes a hole of any length in place",
        ),
        Mutant(
            "plan.in_blocks",
            "found and found[-1].end >= end",
            "found",
            "a promise ends in a hole, which nobody computes",
        ),
        Mutant(
            "plan.sections_of",
            "min(span.end, span.begin + known - anchor)",
            "span.end",
            "a document of which only the beginning is there is loaded whole",
        ),
        Mutant(
            "Spans._there",
            "min(section.end, chunks * size + section.distance)",
            "section.end",
            "chunks that did not come are loaded",
        ),
        Mutant(
            "Spans._bounded",
            "0 if self.why_not_in_place else self._most_in_place",
            "self._most_in_place",
            "a hole is left to workers that compute nothing in place",
        ),
        Mutant(
            "Mover.compute",
            "self._agree(ready)",
            "ready",
            "a rank begins a pass that another one does not, and waits for it without end",
        ),
        Mutant(
            "WorkerHalf.load",
            "self._compute(order)",
            "if self._report.replacements:\n"
            "    self._ended(order, failed=True)\n"
            "else:\n"
            "    self._compute(order)",
            "a rank whose weights were replaced leaves the others waiting before a pass",
        ),
        Mutant(
            "mover.mover_of",
            "parallel.world_size != ranks or parallel.decode_context_parallel_size != 1",
            "False",
            "ranks that keep parts of the tokens move them as if they kept all",
        ),
        Mutant(
            "plan.sections_of",
            "begin - span.begin + anchor",
            "begin - span.begin",
            "a document is taken from where the anchor lies",
        ),
        Mutant(
            "KeyRotation.moved",
            "if distance < 0:\n    ...",
            "...",
            "keys are rotated backwards",
        ),
        Mutant(
            "KeyRotation.explains",
            "bool(gap <= allowed * other.float().abs().max())",
            "True",
            "a wrong rotation passes its check",
        ),
        Mutant(
            "rotary.rotation_of_model",
            "LATENT_MODELS if all((is_latent(layer) for layer in layers)) else MODELS",
            "LATENT_MODELS + MODELS",
            "of a model that expands its latents to heads the wrong part is rotated",
        ),
        Mutant(
            "mover._dims",
            "(layer.qk_rope_head_dim, layer.kv_lora_rank)",
            "(layer.kv_lora_rank, layer.qk_rope_head_dim)",
            "latents are taken for rotated keys",
        ),
        Mutant(
            "rotation.rotation_of",
            "gap > 0.01",
            "gap > 1000000000.0",
            "a model is moved whose rotations do not add up",
        ),
        Mutant(
            "Spans.report",
            "if pending.done + pending.failed < self._jobs.ranks:\n    ...",
            "",
            "one rank computes in place while another copies, and they wait for each other",
        ),
        Mutant(
            "Spans._pass_failed",
            "self._failures == _FAILURES",
            "False",
            "a pass that always fails is tried without end",
        ),
        Mutant(
            "Spans.report",
            "if pending.failed:\n    ...",
            "",
            "tokens are computed in place over KV that one rank does not have",
        ),
        Mutant(
            "WorkerHalf._ended",
            "job.request_id is None or (isinstance(job, SpanJob) and job.goes_on)",
            "job.request_id is None",
            "a request runs before its first tokens are computed in place",
        ),
        Mutant(
            "Mover.compute",
            "not self._rotation.explains(one, other, 0)",
            "False",
            "a pass over wrong tokens or positions is believed",
        ),
        Mutant(
            "Mover.compute",
            "self._writer(0)(torch.zeros_like(keys), torch.zeros_like(values), places)",
            "pass",
            "a pass that writes nothing is believed",
        ),
    ),
)
