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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.bench.model import made
from kvtier.bench.spans import toy

CONFIG = {
    "vocab_size": len(toy.WORDS),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 2,
}
"""Of transformers' Llama. What is not here is as it has it."""
STEPS = 600
_BATCH, _QUESTIONS = 16, 20
_LENGTHS, _GAP = (toy.SHORTEST, toy.SHORTEST + 8), 16
_RATE, _WARM_UP = 2e-3, 30
_GAINS = {"embed_tokens": 1.0, "lm_head": 0.6 * CONFIG["hidden_size"] ** -0.5}
"""Deviations of weights that differ from those of a layer."""
_LEAST_SHARE = 1e-9
_VERSION = 2


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


def drawn(seed: int) -> Any:
    """A Llama with random weights."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(**CONFIG, attn_implementation="eager")
    model, chance = transformers.LlamaForCausalLM(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                gain = _GAINS.get(name.split(".")[-2], 0.7 * weight.shape[1] ** -0.5)
                weight.normal_(0, gain, generator=chance)
    return model


def forward(model: Any, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Scores of all tokens at each answer's place, and how much of its attention the first head of
    each layer gives to each place."""
    every = torch.ones_like(batch.tokens)  # without it, gaps in positions would part the prompt
    out = model.model(batch.tokens, every, batch.positions, output_attentions=True, use_cache=False)
    asked = out.last_hidden_state[batch.answers[:, 0], batch.answers[:, 1]]
    return model.lm_head(asked), [shares[:, 0] for shares in out.attentions]


def train(steps: int, seed: int) -> Any:
    """The same steps and seed give the same weights on the same machine."""
    draw, model = random.Random(seed), drawn(seed)
    learn = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        counts = (2, 3) if step < steps / 5 else (2, 4, 6)
        batch = draw_batch(draw, _BATCH, draw.choice(counts), _LENGTHS, _GAP)
        left = min(1.0, 2 * (1 - step / steps))
        for group in learn.param_groups:
            group["lr"] = _RATE * max(0.05, left) * min(1.0, (step + 1) / _WARM_UP)
        answers, looked = forward(model, batch)
        loss = functional.cross_entropy(answers, batch.answers[:, 2])
        for layer, shares in enumerate(looked):
            _, row, place, target = batch.looks[batch.looks[:, 0] == layer].unbind(1)
            if len(row):
                loss = loss - shares[row, place, target].clamp_min(_LEAST_SHARE).log().mean()
        learn.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        learn.step()
    return model


def accuracy(model: Any, batches: int = 10, seed: int = 1) -> dict[str, float]:
    """Of each kind, over prompts as the benchmark has them, computed in full."""
    draw, right = random.Random(f"check {seed}"), dict[str, list[bool]]()
    for _ in range(batches):
        batch = draw_batch(draw, 2, toy.FOUND, toy.LENGTHS, gap=0)
        with torch.no_grad():
            answers, _ = forward(model, batch)
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
            model = train(steps, seed)
            found = accuracy(model)
        finally:
            torch.set_num_threads(threads)
        _save(folder, model)
        facts = {"accuracy": found, "seconds": round(time.monotonic() - begun, 1)}
        text = json.dumps(facts, indent=2) + "\n"
        (folder / "training.json").write_text(text, encoding="utf-8")

    return made(directory, stamp, make)


def _save(directory: Path, model: Any) -> None:
    """As vLLM reads it: weights, configuration, and a tokenizer of whole words."""
    transformers: Any = importlib.import_module("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
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
