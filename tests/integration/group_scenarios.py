"""Models with several KV cache groups on a real vLLM: see :mod:`tests.integration.scenarios`."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.engine_modes import ROOT
from tests.integration.scenarios import Engine, answered, counts, document

README = ROOT / "connectors/vllm/README.md"
AGAIN = 0, 900
"""The document that is asked again."""
MTP = {"method": "mtp", "num_speculative_tokens": 2}
_BF16 = ("gptoss", "qwen3next")
_STATES = ("qwen3next", "mamba")


def made(model, **arguments):
    """An engine for a preset of :mod:`kvtier.bench.model`, as small as it runs on a CPU."""
    name = Path(model).name
    settings: dict[str, Any] = {"disable_log_stats": False, "blocks": 120}
    if name in _BF16:
        settings["dtype"] = "bfloat16"
    if name in _STATES:  # vLLM makes blocks as long as a state is large
        settings |= {
            "block_size": None,
            "max_model_len": 2200,
            "blocks": 40,
            "enable_prefix_caching": True,
        }
    os.environ["VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"] = "1"
    return Engine(model, **(settings | arguments))


def facts(engine):
    core: Any = engine.llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    config = scheduler.vllm_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    return {
        "kinds": sorted({type(group.kv_cache_spec).__name__ for group in groups}),
        "hybrid": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        "block": max(group.kv_cache_spec.block_size for group in groups),
    }


def life(model, **arguments):
    """Documents, then documents again, and one with more behind it. With kvtier vLLM forgets its
    own cache before each asking, so that a hit can only be kvtier's."""
    engine, told = made(model, **arguments), dict[str, Any]()
    ours = os.environ.get("WITH_KVTIER") == "1"
    told["facts"] = facts(engine) if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else {}
    size = 1500 if Path(model).name in _STATES else 513
    told["facts"]["document"] = size
    documents = [document(seed, size) for seed in range(3)]

    def ask(prompt, **more):
        if ours:
            engine.forget()
        return engine.ask([prompt], **more)[0]

    told["first"] = [ask(prompt, max_tokens=70) for prompt in documents]
    told["again"] = [ask(prompt, max_tokens=70) for prompt in documents]
    longer = documents[0] + told["first"][0]["tokens"] + document(8, 40)
    told["longer"] = [ask(longer) for _ in range(2)]
    told["counts"] = counts(engine)
    return told


def drafted(engine):
    return [engine.metric(f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted")]


def asked_again(model, **arguments):
    """A prompt of 900 tokens, the same again, and one that leaves it eight tokens before its
    end."""
    engine, prompt = made(model, **arguments), document(*AGAIN)
    told: dict[str, Any] = {"facts": facts(engine)}
    for name in ("first", "again"):
        told[name] = engine.ask([prompt])[0]
        if os.environ.get("WITH_KVTIER") == "1":
            engine.forget()
    told["other"] = engine.ask([[*prompt[:-8], *document(1, 20)]])[0]
    told["counts"], told["drafted"] = counts(engine), drafted(engine)
    return told


def asked_again_in_units(model):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (words,) = re.findall(r"`(--prefix-match-unit \d+)`", README.read_text())
    given = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words.split())
    return asked_again(model, prefix_match_unit=given.prefix_match_unit)


def asked_again_drafting(model):
    """A model that drafts its own tokens is asked again."""
    return asked_again(model, speculative_config=MTP, max_model_len=1100)


def tensor_parallel(model):
    return life(model, tensor_parallel_size=2)


main = partial(answered, globals())
if __name__ == "__main__":
    main()
