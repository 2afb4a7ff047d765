"""All arms on one server: the user's own prompts on a server that runs, or the toy's questions.

Each prompt is asked in each arm. A ``cache_salt`` of its own keeps an arm from the others, and from
what the server has cached: a cold prompt has its own, the exact arm has one, and so have the homes
and the requests that take documents from them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from kvtier.bench.command import stepping, waiting
from kvtier.bench.processes.engine import cache_args, cpu_env, engine, served_name, transfer
from kvtier.bench.requests import client
from kvtier.bench.requests.client import Ask, Client, Outcome
from kvtier.bench.spans import toy
from kvtier.bench.spans.arms import ARMS, FULL, ONE_SERVER, Arm, Question, as_ask
from kvtier.bench.spans.report import Answers, Results, Run, answers
from kvtier.core.errors import ConfigError
from kvtier.spans import Order, homes

_FORM = '{"anchor": "<s>You answer.", "documents": ["...", "..."], "question": "..."}'
_UNCACHED = {"kvtier.cache": False}
_TOY_BLOCK = 32
Asked = tuple[Results, dict[str, Any]]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    anchor: str | list[int]
    documents: list[str | list[int]]
    question: str | list[int]


@dataclass(frozen=True, slots=True)
class Prompts:
    """``known``: the right answers in their order, if there are any. ``salt``: no other run has
    it."""

    questions: Sequence[Question]
    output_len: int
    known: Sequence[toy.Known] = ()
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def asks(self, arm: Arm) -> list[Ask]:
        found = [
            as_ask(index, 0, question, arm.order, self.output_len, arm.first)
            for index, question in enumerate(self.questions)
        ]
        if arm.name == FULL:
            return [
                replace(ask, salt=f"{self.salt}-{ask.document}", params=_UNCACHED, may_end=True)
                for ask in found
            ]
        salt = f"{self.salt}-{'exact' if arm.first is None else 'spans'}"
        return [replace(ask, salt=salt, may_end=True) for ask in found]

    def homes(self, chunk_tokens: int) -> list[Ask]:
        """Of every anchor with each of its documents, once."""
        pairs = dict.fromkeys(
            (tuple(one.anchor), tuple(document))
            for one in self.questions
            for document in one.documents
        )
        prompts = [homes(anchor, [document], chunk_tokens)[0] for anchor, document in pairs]
        return [
            Ask(index, 0, home.tokens, 1, salt=f"{self.salt}-spans")
            for index, home in enumerate(prompts)
        ]


def read(path: Path, asker: Client) -> list[Question]:
    """The prompts of the file, in tokens. Raises ConfigError for anything else than lines of the
    form."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: expected a file in UTF-8: {error}") from error
    found = [_question(path, number, line, asker) for number, line in enumerate(lines, 1) if line]
    if not found:
        raise ConfigError(f"--prompts {path}: expected a prompt a line, such as {_FORM}")
    return found


def _question(path: Path, number: int, line: str, asker: Client) -> Question:
    try:
        given = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--prompts {path}, line {number}: {error}; expected for example {_FORM}"
        ) from error
    parts = [given.anchor, *given.documents, given.question]
    if not given.documents or not all(parts):
        raise ConfigError(f"--prompts {path}, line {number}: a part is empty; expected {_FORM}")
    tokens = [client.tokenize(asker, part) if isinstance(part, str) else part for part in parts]
    return Question(tokens[0], tokens[1:-1], tokens[-1])


def ask_running(args: argparse.Namespace) -> Asked:
    """The user's prompts, on the server of ``--base-url``."""
    asker, _ = client.connect(args.base_url, args.model, args.request_timeout)
    if not asker.vllm:
        raise ConfigError(f"--base-url {args.base_url}: expected vLLM's own server, with /tokenize")
    prompts = Prompts(read(args.prompts, asker), args.output_len)
    return _all_arms(args, prompts, asker)


def ask_toy(args: argparse.Namespace) -> Asked:
    """The toy's questions, on a server that is started here. The toy is trained before, once."""
    train = importlib.import_module("kvtier.bench.spans.train")
    with waiting("the toy: some minutes, unless it is trained"):
        args.model = str(train.make_toy(args.output_dir / "toy"))
    args.dtype, args.block_size, args.chunk_tokens = "float32", _TOY_BLOCK, _TOY_BLOCK
    asked = toy.questions(args.requests * args.rounds, args.zipf, args.seed)
    prompts = Prompts([one for one, _ in asked], 1, [known for _, known in asked])
    blocks = math.ceil(toy.LONGEST / _TOY_BLOCK)
    space = cache_args(blocks * _TOY_BLOCK, 4 * blocks, transfer(load_every_hit=True))
    env = {"KVTIER_SPANS": "on", "KVTIER_CHUNK_TOKENS": str(_TOY_BLOCK)}
    env |= {"KVTIER_RAM_BYTES": "1GiB"} | cpu_env(1)
    server = engine(args, _TOY_BLOCK, space, env, args.output_dir / "server.log")
    with contextlib.ExitStack() as running:
        with waiting("server"):
            running.enter_context(server)
        name = served_name(args.model)
        asker, _ = client.connect(server.base_url, name, args.request_timeout)
        return _all_arms(args, prompts, asker)


def _all_arms(args: argparse.Namespace, prompts: Prompts, asker: Client) -> Asked:
    """Raises RequestError when the server does not answer, or takes no document from its home."""
    warm: Sequence[Outcome] = ()
    runs = []
    first = [replace(ask, salt=prompts.salt) for ask in prompts.asks(ARMS[FULL])[:1]]
    client.all_succeeded("a first request", asker.run(first, 1, lambda: None))
    for arm in args.arms or ONE_SERVER:
        if arm.first is not None and not warm:
            asks = prompts.homes(args.chunk_tokens)
            step = stepping("homes", len(asks))
            warm = client.all_succeeded("homes", asker.run(asks, 1, step))
        runs.append(_arm(args, arm, prompts, asker, warm))
    cold = [run for run in runs if run.arm.name == FULL]
    full: dict[Order, Answers] = {"given": answers(cold[0].good)} if cold else {}
    known = {(0, index): one for index, one in enumerate(prompts.known)}
    shape = {
        "prompts": len(prompts.questions),
        "documents": sum(len(one.documents) for one in prompts.questions),
        "homes": len(warm),
        "chunk_tokens": args.chunk_tokens,
        "output_len": prompts.output_len,
        "max_inflight_requests": args.max_inflight_requests,
        "model": asker.model,
        "vllm": asker.version,
    }
    return Results(runs, full, known), shape


def _arm(
    args: argparse.Namespace, arm: Arm, prompts: Prompts, asker: Client, warm: Sequence[Outcome]
) -> Run:
    asks = prompts.asks(arm)
    step = stepping(arm.name, len(asks))
    hits, spans = client.hit_counters(asker.base_url), client.span_tokens(asker.base_url)
    found = asker.run(asks, args.max_inflight_requests, step)
    hits_after = client.hit_counters(asker.base_url)
    spans = client.span_tokens(asker.base_url) - spans
    if arm.first is None:
        return Run(arm, [found], client.hits_between(hits, hits_after))
    if not spans["moved"]:
        raise client.RequestError(
            f"arm {arm.name}: {asker.base_url} took no document from its home; is engine.spans on "
            f"there, and is its chunk_tokens {args.chunk_tokens}? Its metric "
            "vllm:kvtier_unblended_requests_total counts the reasons"
        )
    between = client.hits_between(hits, hits_after)
    return Run(arm, [found], between, warm, spans["computed"], spans["moved"])
