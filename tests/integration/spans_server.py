"""A real vLLM server with kvtier, for tests of documents; and the same model in plain torch.

Run as a module it is vLLM's server, whose CPU platform may not turn prefix caching off for latent
attention.
"""

import sys
from typing import Any, NamedTuple

from kvtier.bench.processes.engine import cache_args, shared_args, transfer
from tests.integration.http_engine import HttpEngine, post
from tests.integration.scenarios import allow_prefixes

CHUNK, BLOCK = 64, 32
UNCACHED = {"kv_transfer_params": {"kvtier.cache": False}}


class Answer(NamedTuple):
    """``first``: logprobs of the likeliest first tokens, by token. ``told``: what is said of it."""

    cached: int
    tokens: list[int]
    first: dict[int, float]
    told: dict[str, Any]


class Served(HttpEngine):
    """``more``: arguments of vLLM. ``settings``: of kvtier, beside a RAM tier."""

    def __init__(self, model, folder, *more, **settings):
        args = [
            *shared_args("tiny", "float32", BLOCK),
            *cache_args(2048, 512, transfer(load_every_hit=True)),
            "--enforce-eager",
            *more,
        ]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "KVTIER_RAM_BYTES": "64MiB",
            "KVTIER_CHUNK_TOKENS": str(CHUNK),
        }
        super().__init__(str(model), args, env | settings, folder / "server.log")

    def tokenize(self, text):
        body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
        return list(post(f"{self.base_url}/tokenize", body)["tokens"])

    def ask(self, tokens, **more):
        named = {"logprobs": 20, "return_tokens_as_token_ids": True}
        told = self.complete(tokens, **(named | more))
        top = told["reply"]["choices"][0]["logprobs"]["top_logprobs"][0]
        first = {int(name.removeprefix("token_id:")): value for name, value in top.items()}
        ours = told["reply"].get("kv_transfer_params") or {}
        return Answer(told["cached"], told["tokens"], first, ours)


class LatentServed(Served):
    """A model with latent attention (MLA), for which vLLM's prefix caching stays on."""

    def __init__(self, model, folder, *more, **settings):
        super().__init__(model, folder, "--attention-backend", "CPU_MLA", *more, **settings)
        self._command[:3] = [sys.executable, "-m", "tests.integration.spans_server"]


class Plain:
    """The model in plain torch, without vLLM and without kvtier: what answers are compared with."""

    def __init__(self, model):
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        loaded: Any = AutoModelForCausalLM
        self._model = loaded.from_pretrained(model, dtype=torch.float32).eval()

    def full(self, tokens):
        """Logprobs of the first answer token, by token id: everything is computed."""
        return self._logprobs(self._forward(tokens, None, 0))

    def blended(self, tokens, ranges, reused, first=0, missing=(), exact=0):
        """The same where the KV of the first ``reused`` tokens comes from the ranges' homes, except
        for the ranges that are ``missing``, and for the first ``exact`` tokens.

        What lies in no home is computed where it stands, run by run, with the token behind it. So
        are the first ``first`` tokens of each span that is moved. The rest stays as in its home.
        """
        _, anchor = ranges[0]
        layers = list[tuple[Any, Any]]()
        held, again = set(range(anchor)), set[int]()
        for index, (begin, last) in enumerate(ranges[1:], 1):
            end = min(last, reused)
            if index in missing or begin >= end:
                continue
            found = self._forward([*tokens[:anchor], *tokens[begin:end]], None, 0).past_key_values
            home = [(layer.keys, layer.values) for layer in found.layers]
            if not layers:
                layers = [(_empty(keys, reused), _empty(values, reused)) for keys, values in home]
            for layer, pair in zip(layers, home, strict=True):
                moved = self._moved([one[:, :, anchor:] for one in pair], begin - anchor)
                for into, one, other in zip(layer, pair, moved, strict=True):
                    into[:, :, :anchor] = one[:, :, :anchor]
                    into[:, :, begin:end] = other
            held |= set(range(begin, end))
            if begin != anchor:
                again |= set(range(begin, min(begin + first, end)))
        if exact:
            found = self._forward(tokens[:exact], None, 0).past_key_values
            for (keys, values), layer in zip(layers, found.layers, strict=True):
                keys[:, :, :exact], values[:, :, :exact] = layer.keys, layer.values
        holes = set(range(reused)) - held
        again |= holes | {place + 1 for place in holes}
        for begin, end in _runs(again):
            found = self._forward(tokens[begin:end], self._cached(layers, begin), begin)
            for (keys, values), layer in zip(layers, found.past_key_values.layers, strict=True):
                keys[:, :, begin:end] = layer.keys[:, :, begin:]
                values[:, :, begin:end] = layer.values[:, :, begin:]
        cache = self._cached(layers, reused)
        return self._logprobs(self._forward(tokens[reused:], cache, reused))

    def _cached(self, layers, length):
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys[:, :, :length], values[:, :, :length], index)
        return cache

    def _moved(self, pair, distance):
        keys, values = pair
        return self._rotated(keys, distance), values

    def _rotated(self, keys, distance):
        place = self._torch.tensor([[distance]])
        cos, sin = self._model.model.rotary_emb(keys, place)
        one, other = keys.chunk(2, -1)
        return keys * cos + self._torch.cat((-other, one), -1) * sin

    def _forward(self, tokens, cache, begin):
        ids = self._torch.tensor([list(tokens)])
        places = self._torch.arange(begin, begin + len(tokens))
        with self._torch.no_grad():
            return self._model(
                input_ids=ids, past_key_values=cache, position_ids=places[None], use_cache=True
            )

    def _logprobs(self, out):
        found: list[float] = out.logits[0, -1].float().log_softmax(-1).tolist()
        return found


class LatentPlain(Plain):
    """Its cache has the latents where others have keys, and the rotated keys where others have
    values."""

    def _moved(self, pair, distance):
        latents, keys = pair
        return latents, self._rotated(keys, distance)


def _empty(like, tokens):
    one, heads, _, width = like.shape
    return like.new_zeros(one, heads, tokens, width)


def _runs(places):
    """Places that follow each other, as ``(begin, end)``."""
    begins = sorted(place for place in places if place - 1 not in places)
    ends = sorted(place + 1 for place in places if place + 1 not in places)
    return list(zip(begins, ends, strict=True))


def gap(answer, logprobs):
    return max(abs(value - logprobs[token]) for token, value in answer.first.items())


if __name__ in ("__main__", "__mp_main__"):
    allow_prefixes()
if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
