"""Time to the first token of a long prompt: computed, and with its KV loaded from page-locked
slots.

Where vLLM runs on CUDA, the real connector is measured in a real engine: a 1.5B model with
generated weights, which takes as long as the published one. Elsewhere transformers computes the
prompt, and :class:`PagedBlocks` loads as many bytes before a forward pass of the last token.
"""

from __future__ import annotations

import importlib.util
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvtier.bench.gpu.copies import Paged, finish
from kvtier.bench.micro.copy import Geometry
from kvtier.bench.report import Row, spread

MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 32768,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
"""Qwen2.5-1.5B's shapes with a smaller vocabulary."""
_FREE_S = 60
Pair = tuple[float, float]
"""Seconds for computed and for loaded."""


def measure_prefill(
    tokens: int,
    rounds: int,
    device: torch.device,
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
) -> list[Row]:
    """TTFT computed and TTFT loaded. The ratio of the loaded row is to the computed one. One row
    with a reason if neither can run. ``engine``: more arguments of vLLM's LLM."""
    arm = _arm(engine or {})
    if arm is None:
        return [
            Row(
                "TTFT: skipped, neither a CUDA build of vLLM nor transformers is installed",
                None,
                "s",
            )
        ]
    name, run = arm
    pairs = run(tokens, rounds, device, model or MODEL)
    computed, loaded = spread([one for one, _ in pairs]), spread([two for _, two in pairs])
    ratio = spread([two / one for one, two in pairs])[0]
    return [
        Row(
            f"TTFT of {tokens} tokens computed ({name})",
            computed[0],
            "s",
            min=computed[1],
            max=computed[2],
        ),
        Row(
            f"TTFT of {tokens} tokens loaded ({name})",
            loaded[0],
            "s",
            computed[0],
            ratio,
            loaded[1],
            loaded[2],
        ),
    ]


def _arm(
    engine: dict[str, Any],
) -> tuple[str, Callable[[int, int, torch.device, dict[str, Any]], list[Pair]]] | None:
    if importlib.util.find_spec("vllm") is not None and torch.cuda.is_available():
        return "vLLM", partial(with_vllm, engine=engine)
    if importlib.util.find_spec("transformers") is not None:
        return "transformers", with_transformers
    return None


def prompt(tokens: int, seed: int, words: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, words) for _ in range(tokens)]


def with_vllm(
    tokens: int,
    rounds: int,
    _device: torch.device,
    model: dict[str, Any],
    *,
    engine: dict[str, Any],
) -> list[Pair]:
    """vLLM's own prefix cache is emptied before the second time, so that almost all of the prompt
    comes from slots."""
    from vllm import LLM, SamplingParams

    from kvtier.cli.launch import TRANSFER
    from kvtier.connectors.vllm import LOAD_EVERY_HIT

    width = model["hidden_size"] // model["num_attention_heads"]
    kv_bytes = 2 * 2 * model["num_key_value_heads"] * width * model["num_hidden_layers"]
    extra = {
        "auto": False,
        "ram_bytes": 3 * (rounds + 1) * tokens * kv_bytes,
        LOAD_EVERY_HIT: True,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=tokens + 64,
            kv_transfer_config=TRANSFER | {"kv_connector_extra_config": extra},
            **engine,
        )
        settings = SamplingParams(max_tokens=1, detokenize=False)

        def ask(ids: list[int], hit: bool = False) -> float:
            begun = time.perf_counter()
            (told,) = llm.generate([{"prompt_token_ids": ids}], settings, use_tqdm=False)
            took = time.perf_counter() - begun
            cached = told.num_cached_tokens or 0
            if cached < len(ids) * 0.9 if hit else cached:
                raise RuntimeError(f"{cached} of {len(ids)} tokens were a hit: nothing measured")
            return took

        pairs = []
        for seed in range(rounds + 1):
            ids = prompt(tokens, seed, model["vocab_size"])
            computed = ask(ids)
            # a step later everything is confirmed; its tokens begin no other prompt
            ask(prompt(64, 10**6 + seed, model["vocab_size"]))
            _forget(llm)
            pairs.append((computed, ask(ids, hit=True)))
        return pairs[1:]


def _forget(llm: Any) -> None:
    """Empty vLLM's own prefix cache, as soon as no step holds a block."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    while core is not None and core.batch_queue:  # an engine in this process steps when it is asked
        core.step_fn()
    until = time.monotonic() + _FREE_S
    while not llm.reset_prefix_cache():
        if time.monotonic() > until:
            raise RuntimeError(f"vLLM still held blocks {_FREE_S} s after the last answer")
        time.sleep(0.001)


def with_transformers(
    tokens: int, rounds: int, device: torch.device, model: dict[str, Any]
) -> list[Pair]:
    """The forward pass of the last token runs over the KV that the prefill left. The load moves as
    many bytes."""
    import transformers

    config = transformers.AutoConfig.for_model(**model)
    engine = (
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        .to(device)
        .eval()
    )
    layers, heads = model["num_hidden_layers"], model["num_key_value_heads"]
    width = model["hidden_size"] // model["num_attention_heads"]
    shape = Geometry("prefill", layers, 2 * 2 * heads * width, 16)
    paged = Paged(shape, tokens, device)
    paged.save()
    jobs = paged.jobs[: tokens // 256]
    pairs = []
    with torch.inference_mode():
        for seed in range(rounds + 1):
            ids = torch.tensor([prompt(tokens, seed, model["vocab_size"])], device=device)
            finish(device)
            begun = time.perf_counter()
            done = engine(ids, use_cache=True, logits_to_keep=1)
            first = int(done.logits.argmax())
            computed = time.perf_counter() - begun
            begun = time.perf_counter()
            paged.copier.load(jobs)
            last = engine(
                ids[:, -1:], past_key_values=done.past_key_values, use_cache=True, logits_to_keep=1
            )
            assert first < model["vocab_size"] > int(last.logits.argmax())
            pairs.append((computed, time.perf_counter() - begun))
    paged.close()
    return pairs[1:]
