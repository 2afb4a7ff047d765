"""Trains the toy: a tiny Llama that answers the questions of :mod:`kvtier.bench.spans.toy`.

``python -m kvtier.bench.spans.train DIR`` takes some minutes on one core. All weights begin at
random. The loss has a second part beside the answers: it tells one head of each layer where to
look. The first layer's head looks at the token before. The second layer's head looks from a fact
that points to an earlier document to the value that is meant. The last layer's head looks from a
question to its place. Without that part, such a small model needs hours to find the same.

So a fact that points to an earlier document is resolved in that fact's own keys and values. They
are in the middle of a document, and they depend on another one. Such a fact is what a document that
comes from another prompt has lost.

Documents are short while the toy learns, and their positions have gaps where filler may stand. So
it learns distances of long documents at the price of short ones.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.bench.model import made
from kvtier.bench.spans import toy

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": len(toy.WORDS),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "float32",
}
Weights = dict[str, Tensor]
STEPS = 600
_BATCH, _QUESTIONS = 16, 20
_LENGTHS, _GAP = (toy.SHORTEST, toy.SHORTEST + 8), 16
_RATE, _WARM_UP = 2e-3, 30
_VERSION = 1


class Batch(NamedTuple):
    """Prompts side by side. ``looks``: rows of layer, prompt, the place that looks, and the place
    that it is to look at. ``answers``: rows of prompt, the place before an answer, and its token.
    ``kinds``: of each answer."""

    tokens: Tensor
    positions: Tensor
    looks: Tensor
    answers: Tensor
    kinds: list[str]


def draw_batch(
    draw: random.Random, size: int, documents: int, lengths: tuple[int, int], gap: int
) -> Batch:
    """``gap``: positions that are left out behind a word of filler, at most."""
    tokens, positions, looks, answers, kinds = [], [], [], [], []
    for row in range(size):
        told = toy.tell(toy.pool(draw, [draw.randint(*lengths) for _ in range(documents)]))
        ids = toy.anchor(draw.randint(4, 16))
        before = len(ids)
        ids += told.tokens
        looks += [(1, row, before + place, before + target) for place, target in told.resolved]
        for asked in _questions(draw, told.asked):
            ids += asked.tokens
            looks.append((2, row, len(ids) - 1, before + asked.place))
            answers.append((row, len(ids) - 1, asked.answer))
            kinds.append(asked.kind)
        places = [0]
        for token in ids[:-1]:
            places.append(places[-1] + 1 + (draw.randint(0, gap) if toy.is_filler(token) else 0))
        near = [at for at in range(1, len(ids)) if places[at] == places[at - 1] + 1]
        looks += [(0, row, at, at - 1) for at in near]
        tokens.append(torch.tensor(ids))
        positions.append(torch.tensor(places))
    padded = torch.nn.utils.rnn.pad_sequence
    return Batch(
        padded(tokens, batch_first=True, padding_value=CONFIG["pad_token_id"]),
        padded(positions, batch_first=True),
        torch.tensor(looks),
        torch.tensor(answers),
        kinds,
    )


def _questions(draw: random.Random, asked: Sequence[toy.Asked]) -> Iterator[toy.Asked]:
    """As many of each kind."""
    by_kind: dict[str, list[toy.Asked]] = {}
    for one in asked:
        by_kind.setdefault(one.kind, []).append(one)
    for _ in range(_QUESTIONS):
        yield draw.choice(by_kind[draw.choice(list(by_kind))])


def drawn(seed: int) -> Weights:
    """Random weights, with the names of a published Llama's, so that vLLM can read them."""
    chance = torch.Generator().manual_seed(seed)
    width, inner, size = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * size, width),
        "self_attn.k_proj": (kv_heads * size, width),
        "self_attn.v_proj": (kv_heads * size, width),
        "self_attn.o_proj": (width, heads * size),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    words = (CONFIG["vocab_size"], width)
    weights = {"model.embed_tokens": torch.randn(words, generator=chance)}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, shape in shapes.items():
            matrix = 0.7 * shape[1] ** -0.5 * torch.randn(shape, generator=chance)
            weights[f"model.layers.{layer}.{name}"] = matrix
        weights |= {f"model.layers.{layer}.{name}": torch.ones(width) for name in norms}
    weights |= {"model.norm": torch.ones(width)}
    weights |= {"lm_head": 0.6 * width**-0.5 * torch.randn(words, generator=chance)}
    return {f"{name}.weight": weight.requires_grad_() for name, weight in weights.items()}


def forward(weights: Weights, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Scores of all tokens at each answer's place, and of each layer the first head's scores."""
    size, length = CONFIG["head_dim"], batch.tokens.shape[1]
    turns = CONFIG["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    angles = (batch.positions[:, None, :, None] * turns).repeat(1, 1, 1, 2)
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    hidden = weights["model.embed_tokens.weight"][batch.tokens]
    looked = []
    for layer in range(CONFIG["num_hidden_layers"]):
        mark = f"model.layers.{layer}."
        own = {
            name.removeprefix(mark).split(".")[-2]: weight
            for name, weight in weights.items()
            if name.startswith(mark)
        }
        out, scores = _attention(own, _normed(hidden, own["input_layernorm"]), angles, unseen)
        hidden = hidden + out
        x = _normed(hidden, own["post_attention_layernorm"])
        gate, up = x @ own["gate_proj"].T, x @ own["up_proj"].T
        hidden = hidden + functional.silu(gate) * up @ own["down_proj"].T
        looked.append(scores[:, 0])
    asked = hidden[batch.answers[:, 0], batch.answers[:, 1]]
    out = _normed(asked, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    return out, looked


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).rsqrt() * weight


def _attention(
    own: Mapping[str, Tensor], x: Tensor, angles: Tensor, unseen: Tensor
) -> tuple[Tensor, Tensor]:
    def split(name: str) -> Tensor:
        return (x @ own[name].T).unflatten(-1, (-1, CONFIG["head_dim"])).transpose(1, 2)

    query, key = _rotated(split("q_proj"), angles), _rotated(split("k_proj"), angles)
    shared = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    key, value = (one.repeat_interleave(shared, 1) for one in (key, split("v_proj")))
    scores = query @ key.transpose(-1, -2) / CONFIG["head_dim"] ** 0.5
    scores = scores.masked_fill(unseen, float("-inf"))
    out = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    return out @ own["o_proj"].T, scores


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()


def train(steps: int, seed: int) -> Weights:
    """The same steps and seed give the same weights on the same machine."""
    draw, weights = random.Random(seed), drawn(seed)
    learn = torch.optim.AdamW(weights.values(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        counts = (2, 3) if step < steps / 5 else (2, 4, 6)
        batch = draw_batch(draw, _BATCH, draw.choice(counts), _LENGTHS, _GAP)
        left = min(1.0, 2 * (1 - step / steps))
        for group in learn.param_groups:
            group["lr"] = _RATE * max(0.05, left) * min(1.0, (step + 1) / _WARM_UP)
        answers, looked = forward(weights, batch)
        loss = functional.cross_entropy(answers, batch.answers[:, 2])
        for layer, scores in enumerate(looked):
            _, row, place, target = batch.looks[batch.looks[:, 0] == layer].unbind(1)
            if len(row):
                loss = loss + functional.cross_entropy(scores[row, place], target)
        learn.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        learn.step()
    return {name: weight.detach() for name, weight in weights.items()}


def accuracy(weights: Weights, batches: int = 10, seed: int = 1) -> dict[str, float]:
    """Of each kind, over prompts as the benchmark has them, computed in full."""
    draw, right = random.Random(f"check {seed}"), dict[str, list[bool]]()
    for _ in range(batches):
        batch = draw_batch(draw, 2, toy.FOUND, toy.LENGTHS, gap=0)
        answers, _ = forward(weights, batch)
        found = answers.argmax(-1) == batch.answers[:, 2]
        for kind, one in zip(batch.kinds, found.tolist(), strict=True):
            right.setdefault(kind, []).append(one)
    return {kind: sum(right[kind]) / len(right[kind]) for kind in toy.KINDS if kind in right}


def make_toy(directory: str | Path, steps: int = STEPS, seed: int = 0) -> Path:
    """Train the toy into ``directory`` unless it is there already. Return the directory.

    A directory with files that this function did not make is never overwritten: ValueError.
    """
    stamp = {"version": _VERSION, "steps": steps, "seed": seed, "config": CONFIG}

    def make(folder: Path) -> None:
        threads, begun = torch.get_num_threads(), time.monotonic()
        torch.set_num_threads(1)
        try:
            weights = train(steps, seed)
            found = accuracy(weights)
        finally:
            torch.set_num_threads(threads)
        _save(folder, weights)
        facts = {"accuracy": found, "seconds": round(time.monotonic() - begun, 1)}
        text = json.dumps(facts, indent=2) + "\n"
        (folder / "training.json").write_text(text, encoding="utf-8")

    return made(directory, stamp, make)


def _save(directory: Path, weights: Weights) -> None:
    """As vLLM reads it: weights, configuration, and a tokenizer of whole words."""
    save_file = importlib.import_module("safetensors.torch").save_file
    transformers: Any = importlib.import_module("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(CONFIG, indent=2) + "\n"
    (directory / "config.json").write_text(config, encoding="utf-8")
    words = {word: number for number, word in enumerate(toy.WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=toy.WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=toy.WORDS[0],
        bos_token=toy.WORDS[1],
        eos_token=toy.WORDS[2],
        pad_token=toy.WORDS[2],
    ).save_pretrained(directory)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvtier.bench.spans.train", description="Train the toy of the benchmark of spans."
    )
    about = "where the model goes; it is trained again only if its parameters differ"
    parser.add_argument("directory", type=Path, help=about)
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    args = parser.parse_args(argv)
    try:
        made = make_toy(args.directory, seed=args.seed)
    except ValueError as error:
        print(f"kvtier.bench.spans.train: {error}", file=sys.stderr)
        return 2
    print(made, (made / "training.json").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
