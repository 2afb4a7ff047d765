"""Engines whose weights are replaced, and some that have no prefixes to keep: run as ``python -m
tests.integration.key_scenarios NAME OUT MODEL``, as :mod:`tests.integration.scenarios` is, whose
engine they use.
"""

from functools import partial
from typing import Any

from tests.integration.scenarios import CHUNK, Engine, answered, document, rounds


def short(model):
    return rounds(Engine(model))


def prefix_caching(model):
    """An engine's answers, and whether it has the prefix cache that was asked for."""
    engine = Engine(model, enable_prefix_caching=True)
    config = engine.llm.llm_engine.vllm_config.cache_config
    return {"answers": rounds(engine), "prefix_caching": config.enable_prefix_caching}


def prefix_lm(model):
    engine = Engine(model)
    prompts = [document(0), document(0)[:-CHUNK] + document(1)[-CHUNK:]]
    apart: dict[str, Any] = {"extra_args": {"kv_transfer_params": {"kvtier.cache": False}}}
    return [[engine.ask([one], **more)[0] for one in prompts] for more in (apart, {})]


def mean_pooling(model):
    """Embeddings of one prompt, again and again. A hit lacks what the mean is made of."""
    from vllm.config import PoolerConfig

    pooling = PoolerConfig(seq_pooling_type="MEAN")
    engine = Engine(model, runner="pooling", convert="embed", pooler_config=pooling)
    prompts: list[Any] = [{"prompt_token_ids": document(0)}]
    return [engine.llm.embed(prompts, use_tqdm=False)[0].outputs.embedding for _ in range(3)]


def written(model):
    """The running engine's embeddings are written over in place, past everything that vLLM or torch
    counts."""
    engine = Engine(model, worker_extension_cls="tests.integration.key_scenarios.Writer")
    before = rounds(engine)
    engine.llm.collective_rpc("write_embeddings")
    engine.forget()
    return {"before": before, "after": rounds(engine, times=3)}


class Writer:
    """What a trainer adds to vLLM's workers."""

    model_runner: Any

    def write_embeddings(self):
        for name, parameter in self.model_runner.model.named_parameters():
            if "embed_tokens" in name:
                parameter.data.copy_(parameter.data.roll(1, dims=0))


main = partial(answered, globals())
if __name__ == "__main__":
    main()
