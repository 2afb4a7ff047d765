"""Engines in each of vLLM's modes: run as :mod:`tests.integration.scenarios` is, whose engine they
use.

What a hit gives is compared with what *the same engine* gives from its own prefix cache, at the
same place in its batches: :func:`thrice` asks cold, again at once, and again when only kvtier has
the prompt. A second engine over the same disk does the same: what it answers cold comes from NVMe.
A scenario also tells what shows that its mode is in force, from the schedules of vLLM's own
scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.scenarios import (
    BLOCK,
    CHUNK,
    PATCHES,
    PLENTY,
    Engine,
    allow_prefixes,
    answer,
    answered,
    counts,
    document,
    pipeline_buffers,
)
from tests.integration.tiny_models import IMAGE_TOKENS, image_token, make_draft, picture

PROMPT = 17 * BLOCK - 1
"""Tokens whose longest hit is 512, in vLLM's own cache and in kvtier's: 31 are left to compute."""
EAGLE_PROMPT = PROMPT + BLOCK
"""The same with a draft by EAGLE: vLLM takes one block less from its own cache then."""
LATENT_PROMPT = 16 * BLOCK + 16
"""The same where vLLM's blocks have 16 tokens: 16 are left to compute."""

Ask = Callable[[int], list[dict[str, Any]]]


class Watched(Engine):
    """An engine in one process, whose scheduler is looked at: what it planned, step by step."""

    def __init__(self, model, blocks=PLENTY, **arguments):
        super().__init__(model, blocks, disable_log_stats=False, **arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.plans: list[Any] = []
        self.most_in_flight = 0
        """Steps planned whose results the scheduler had not seen yet."""
        scheduler, seen = self.core.scheduler, [0]
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def planned(*arguments, **more):
            self.plans.append(schedule(*arguments, **more))
            self.most_in_flight = max(self.most_in_flight, len(self.plans) - seen[0])
            return self.plans[-1]

        def updated(*arguments, **more):
            seen[0] += 1
            return update(*arguments, **more)

        scheduler.schedule, scheduler.update_from_output = planned, updated

    def loaded(self):
        return {
            name: count
            for name, count in counts(self).items()
            if name.startswith("loaded") and count
        }


def thrice(engine, ask, seed):
    """``ask`` a prompt cold, from vLLM's own prefix cache, and when only kvtier has it. ``loaded``:
    chunks that kvtier had loaded after each; ``plans``: tokens that each step computed for each
    request, while only kvtier had it, and ``own_plans`` before."""
    answers, loaded = {"cold": ask(seed)}, [engine.loaded()]
    begun = [len(engine.plans)]
    answers["own"] = ask(seed)
    loaded.append(engine.loaded())
    engine.forget()
    begun.append(len(engine.plans))
    answers["warm"] = ask(seed)
    loaded.append(engine.loaded())
    own, warm = (
        [list(plan.num_scheduled_tokens.values()) for plan in plans if plan.num_scheduled_tokens]
        for plans in (engine.plans[begun[0] : begun[1]], engine.plans[begun[1] :])
    )
    return answers | {"loaded": loaded, "own_plans": own, "plans": warm}


def ways(model):
    """Prompts in pieces, several answers to one, beams, structured output and logprobs of the
    prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    engine = Watched(model, max_num_batched_tokens=16, max_num_seqs=8)
    config = engine.llm.llm_engine.vllm_config.scheduler_config
    assert config.enable_chunked_prefill and config.max_num_batched_tokens == 16

    def several(seed: int) -> list[dict[str, Any]]:
        # Only the best token may be sampled: greedy gives one answer, and vLLM's CPU runner dies of
        # a seed here.
        settings = SamplingParams(
            n=3, temperature=1.0, top_k=1, max_tokens=8, ignore_eos=True, logprobs=0
        )
        (output,) = engine.llm.generate([_prompt(seed)], settings, use_tqdm=False)
        return [answer(output, one) for one in output.outputs]

    def beams(seed):
        settings = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
        (output,) = engine.llm.beam_search([_prompt(seed)], settings)
        return [
            {"tokens": list(one.tokens[-4:]), "logprobs": [one.cum_logprob]}
            for one in output.sequences
        ]

    def structured(seed):
        only = StructuredOutputsParams(choice=["yes", "no", "perhaps"])
        return engine.ask([_tokens(seed)], structured_outputs=only, ignore_eos=False, max_tokens=12)

    def prompt_logprobs(seed):
        return engine.ask([_tokens(seed)]) + engine.ask([_tokens(seed)], prompt_logprobs=0)

    asked: dict[str, Ask] = {
        "in pieces": lambda seed: engine.ask([_tokens(seed)]),
        "several": several,
        "beams": beams,
        "structured": structured,
        "prompt logprobs": prompt_logprobs,
    }
    return {name: thrice(engine, ask, number) for number, (name, ask) in enumerate(asked.items())}


def no_prefix_caching(model):
    """vLLM keeps nothing: every hit is kvtier's."""
    engine = Watched(model, enable_prefix_caching=False)
    assert not engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    return {"answers": thrice(engine, lambda seed: engine.ask([_tokens(seed)]), 0)}


def one_prompt(model):
    engine = Watched(model)
    return {"answers": thrice(engine, lambda seed: engine.ask([_tokens(seed)]), 0)}


def quantised(model):
    """KV of eight bits, which vLLM's backend for CPUs has in one form."""
    engine = Watched(model, kv_cache_dtype="fp8_e5m2")
    assert engine.llm.llm_engine.vllm_config.cache_config.cache_dtype == "fp8_e5m2"
    return {"answers": thrice(engine, lambda seed: engine.ask([_tokens(seed)]), 0)}


def preemption(model):
    blocks = int(os.environ["TEST_BLOCKS"])
    engine = Watched(model, blocks, max_num_seqs=2, max_model_len=16 * BLOCK)
    resumed: list[int] = []
    scheduler = engine.core.scheduler
    allocated = scheduler.connector.update_state_after_alloc

    def noted(request, blocks, tokens):
        if request.num_preemptions:
            resumed.append(tokens)
        allocated(request, blocks, tokens)

    scheduler.connector.update_state_after_alloc = noted
    told = thrice(
        engine,
        lambda _: engine.ask([document(seed, 9 * BLOCK - 1) for seed in range(2)], max_tokens=96),
        0,
    )
    return told | {"preemptions": engine.metric("num_preemptions"), "resumed": resumed}


def ngram(model):
    return _speculative(
        model,
        {
            "method": "ngram",
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
            "num_speculative_tokens": 3,
        },
        PROMPT,
    )


def eagle(model):
    return _speculative(model, _eagle(model), EAGLE_PROMPT)


def structured_drafts(model):
    """A letter of the answer is forbidden. A draft model guesses at what comes before it, and at
    what would follow."""
    from vllm.sampling_params import StructuredOutputsParams

    engine = Watched(model, speculative_config=_eagle(model))
    prompt, tokens = document(0, EAGLE_PROMPT), 24
    (free,) = engine.ask([prompt], salt="another's", max_tokens=tokens)
    letter = list(dict.fromkeys(filter(str.isalpha, free["text"])))[-1]
    only = StructuredOutputsParams(regex=f"[^{letter}]*")

    def ask(_):
        settings: dict[str, Any] = {"ignore_eos": False, "max_tokens": tokens}
        return engine.ask([prompt], structured_outputs=only, **settings)

    before, told = _drafted(engine), thrice(engine, ask, 0)
    drafted = {name: count - before[name] for name, count in _drafted(engine).items()}
    return {"answers": told, "tokens": drafted, "free": free["text"], "letter": letter}


def _eagle(model):
    prompts = [document(seed, EAGLE_PROMPT) for seed in (0, 1)]
    draft = make_draft(Path(os.environ["TEST_FOLDER"]) / "draft", Path(model), prompts, 72)
    return {"method": "eagle", "model": str(draft), "num_speculative_tokens": 3}


def _speculative(model, how, tokens):
    """An answer long enough that a chunk is saved from what was drafted, and a next turn that is
    hit as far as this."""
    engine = Watched(model, speculative_config=how)
    prompt = document(0, tokens)
    told = {"answers": thrice(engine, lambda _: engine.ask([prompt], max_tokens=CHUNK + 8), 0)}
    turn = (prompt + told["answers"]["own"][0]["tokens"])[: tokens + CHUNK]
    told["turn"] = thrice(engine, lambda _: engine.ask([turn]), 0)
    return told | {"tokens": _drafted(engine)}


def _drafted(engine):
    return {name: engine.metric(f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted")}


def tensor_parallel(model):
    engine = Watched(model, tensor_parallel_size=2)
    assert engine.llm.llm_engine.vllm_config.parallel_config.world_size == 2
    return _one_and_several(engine)


def pipeline_parallel(model):
    os.environ["TEST_PATCH"] = pipeline_buffers.__name__
    engine = Watched(model, pipeline_parallel_size=2)
    assert engine.llm.llm_engine.vllm_config.parallel_config.pipeline_parallel_size == 2
    return _one_and_several(engine)


def latent(model):
    return _latent(model)


def latent_tensor_parallel(model):
    return _latent(model, tensor_parallel_size=2)


def _latent(model, **arguments):
    """Multi-head latent attention, for which vLLM's platform may not turn prefix caching off here.
    What of a prompt is left after a hit is computed as vLLM computes it after its own."""
    allow_prefixes()
    engine = Watched(model, attention_backend="CPU_MLA", **arguments)
    scheduler = engine.core.scheduler
    (group,) = scheduler.kv_cache_config.kv_cache_groups
    told = _one_and_several(engine, LATENT_PROMPT)
    return told | {
        "prefix caching": scheduler.vllm_config.cache_config.enable_prefix_caching,
        "kept": type(group.kv_cache_spec).__name__,
        "ranks": scheduler.vllm_config.parallel_config.world_size,
        "replicas": scheduler.kv_cache_config.kv_tp_replicas,
        "chunk bytes": scheduler.connector._scheduler._layout.chunk_bytes,
    }


def _one_and_several(engine, tokens=PROMPT):
    told = {
        "one": thrice(engine, lambda seed: engine.ask([document(seed, tokens)]), 0),
        "several": thrice(
            engine,
            lambda seed: engine.ask([document(seed + index, tokens) for index in range(4)]),
            1,
        ),
    }
    return told | {"most in flight": engine.most_in_flight}


def seeing(model):
    from vllm import SamplingParams

    engine = Watched(model)
    assert engine.llm.llm_engine.vllm_config.model_config.is_multimodal_model
    settings = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)

    def ask(number):
        text = document(0, PROMPT - IMAGE_TOKENS)
        prompt = {
            "prompt_token_ids": [*text[:10], image_token(model), *text[10:]],
            "multi_modal_data": {"image": picture(number)},
        }
        (output,) = engine.llm.generate([prompt], settings, use_tqdm=False)
        assert len(output.prompt_token_ids) == PROMPT
        return [answer(output)]

    return {
        f"image {number}": thrice(engine, lambda _, number=number: ask(number), 0)
        for number in range(2)
    }


def _tokens(seed):
    return document(seed, PROMPT)


def _prompt(seed):
    return {"prompt_token_ids": _tokens(seed)}


main = partial(answered, globals())
if __name__ == "__mp_main__" and os.environ.get("TEST_PATCH") in PATCHES:
    PATCHES[os.environ["TEST_PATCH"]]()
if __name__ == "__main__":
    main()
