"""A real vLLM server with kvtier, for tests of documents; and the same model in plain torch."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bench.processes.engine import cache_args, shared_args, transfer
from kvtier.bench.processes.servers import VllmServer

CHUNK, BLOCK = 64, 32
UNCACHED = {"kv_transfer_params": {"kvtier.cache": False}}


class Answer(NamedTuple):
    """``first``: logprobs of the likeliest first tokens, by token. ``told``: what is said of it."""

    cached: int
    tokens: list[int]
    first: dict[int, float]
    told: dict[str, Any]


class Served(VllmServer):
    """``settings``: of kvtier, beside a RAM tier."""

    def __init__(self, model: Path, folder: Path, *, eager: bool = True, **settings: str) -> None:
        args = [
            *shared_args("tiny", "float32", BLOCK),
            *cache_args(2048, 512, transfer(load_every_hit=True)),
            *(["--enforce-eager"] if eager else []),
        ]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "KVTIER_RAM_BYTES": "64MiB",
            "KVTIER_CHUNK_TOKENS": str(CHUNK),
        }
        super().__init__(str(model), args, env | settings, folder / "server.log")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        url = self.base_url + path
        request = urllib.request.Request(url, data, headers)  # noqa: S310 - a server of ours
        with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
            said = reply.read().decode()
        return json.loads(said) if said.startswith(("{", "[")) else said

    def forget_own(self) -> None:
        """From here on only kvtier has what was computed."""
        assert self.post("/reset_prefix_cache", {})["success"]

    def forget_all(self) -> None:
        self.post("/reset_prefix_cache?reset_external=true", {})

    def tokenize(self, text: str) -> list[int]:
        body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
        return list(self.post("/tokenize", body)["tokens"])

    def ask(self, tokens: Sequence[int], **more: Any) -> Answer:
        body: dict[str, Any] = {"model": "tiny", "prompt": list(tokens), "max_tokens": 8}
        body |= {"temperature": 0, "logprobs": 20, "ignore_eos": True}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        reply = self.post("/v1/completions", body | more)
        details = reply["usage"]["prompt_tokens_details"] or {}
        (choice,) = reply["choices"]
        top = choice["logprobs"]["top_logprobs"][0]
        first = {int(name.removeprefix("token_id:")): value for name, value in top.items()}
        told = reply.get("kv_transfer_params") or {}
        return Answer(details.get("cached_tokens") or 0, choice["token_ids"], first, told)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=60) as reply:  # noqa: S310
            lines = reply.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if re.match(rf"{name}[{{ ]", line)]
        return sum(float(line.split()[-1]) for line in found if all(one in line for one in wanted))


class Plain:
    """The model in plain torch, without vLLM and without kvtier: what answers are compared with."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        loaded: Any = AutoModelForCausalLM
        self._model = loaded.from_pretrained(model, dtype=torch.float32).eval()

    def full(self, tokens: Sequence[int]) -> list[float]:
        """Logprobs of the first answer token, by token id: everything is computed."""
        return self._logprobs(self._forward(tokens, None, 0))

    def blended(
        self,
        tokens: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        reused: int,
        first: int = 0,
    ) -> list[float]:
        """The same where the KV of the first ``reused`` tokens comes from each range's home.

        ``first``: so many tokens at the beginning of each moved span are computed in place, span by
        span. What stands behind them stays as it was in the home.
        """
        (_, anchor), layers = ranges[0], list[tuple[Any, Any]]()
        torch = self._torch
        for begin, end in ranges[1:]:
            home = [*tokens[:anchor], *tokens[begin:end]]
            found = self._forward(home, None, 0).past_key_values
            for index, layer in enumerate(found.layers):
                keys, values = layer.keys, layer.values
                moved = self._moved(keys[:, :, anchor:], begin - anchor)
                if begin == anchor:
                    moved, taken = keys, values
                    layers.append((moved, taken))
                    continue
                before = layers[index]
                layers[index] = (
                    torch.cat((before[0], moved), 2),
                    torch.cat((before[1], values[:, :, anchor:]), 2),
                )
        from transformers import DynamicCache

        def cached(length: int) -> Any:
            cache: Any = DynamicCache()
            for index, (keys, values) in enumerate(layers):
                cache.update(keys[:, :, :length], values[:, :, :length], index)
            return cache

        for begin, end in ranges[2:] if first else ():
            until = min(begin + first, end, reused)
            again = self._forward(tokens[begin:until], cached(begin), begin).past_key_values
            for (keys, values), layer in zip(layers, again.layers, strict=True):
                keys[:, :, begin:until] = layer.keys[:, :, begin:]
                values[:, :, begin:until] = layer.values[:, :, begin:]
        cache = cached(reused)
        return self._logprobs(self._forward(tokens[reused:], cache, reused))

    def _moved(self, keys: Any, distance: int) -> Any:
        """Rotated by transformers' own tables."""
        place = self._torch.tensor([[distance]])
        cos, sin = self._model.model.rotary_emb(keys, place)
        one, other = keys.chunk(2, -1)
        return keys * cos + self._torch.cat((-other, one), -1) * sin

    def _forward(self, tokens: Sequence[int], cache: Any, begin: int) -> Any:
        ids = self._torch.tensor([list(tokens)])
        places = self._torch.arange(begin, begin + len(tokens))
        with self._torch.no_grad():
            return self._model(
                input_ids=ids,
                past_key_values=cache,
                position_ids=places[None],
                use_cache=True,
            )

    def _logprobs(self, out: Any) -> list[float]:
        found: list[float] = out.logits[0, -1].float().log_softmax(-1).tolist()
        return found


def gap(answer: Answer, logprobs: Sequence[float]) -> float:
    """How far an answer's logprobs are from those of the plain model, at most."""
    return max(abs(value - logprobs[token]) for token, value in answer.first.items())
