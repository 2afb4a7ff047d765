"""``make demo``: what kvtier gains on real vLLM on this machine, within five minutes on any.

It makes a small model in ``build/demo/kvtier-demo`` (once), and starts an engine with RAM and NVMe.
The time of that and of a prompt of 1,024 tokens tell how fast the machine is. Documents are then as
long, and arms as many, as the bound allows, in the order of what they show: documents from RAM,
from NVMe after a restart, without kvtier, from a cache server, from Redis. An alarm ends what takes
longer than was estimated, and what was measured by then is told.

``--all`` runs every arm of Long Doc QA at its full size instead, however long that takes. The model
computes in float32, so that every arm must give exactly the same tokens. This is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from kvtier.bench.command import say, terminable, waiting
from kvtier.bench.flags import chosen, seconds
from kvtier.bench.long_doc_qa import run as long_doc_qa
from kvtier.bench.long_doc_qa.arms import ARMS, COLD, NONE, PRESETS, Arm, Workload
from kvtier.bench.long_doc_qa.report import Round
from kvtier.bench.model import make_model
from kvtier.bench.processes.servers import VllmServer
from kvtier.core.errors import KVTierError
from kvtier.core.extras import require
from kvtier.core.terminal import Parser

_MODEL = "kvtier-demo"
_SHAPE = (
    *("--num-documents", "4", "--document-length", "4096", "--question-length", "128"),
    *("--output-len", "16", "--repeat-count", "2", "--max-inflight-requests", "1"),
    *("--dtype", "float32", "--require-same-tokens"),
)
_BOUND_S, _END_S = 300.0, 30.0
"""The bound of everything, and the part of it that is kept for stopping servers."""
_LENGTHS_TOKENS = (4096, 2048, 1024, 512)
_DOCUMENTS = 3
_HIT_TOKENS = 1024
"""Cost of an answer about a cached document, at most: its question and 16 tokens."""
_MARGIN = 1.15
_SETTLE_S = 2.0
_RAM, _RESTART = "kvtier-ram", "kvtier-nvme-restart"
_MORE = (NONE, "kvtier-server", "kvtier-redis")
_MORE_TIME = (
    "The other arms need more time: `.venv/bin/python -m kvtier.bench.demo --seconds 900`, or "
    "`make demo-all`, which has no bound."
)
_RESET_TRIES, _RESET_PAUSE_S = 20, 0.5


class Finish(Enum):
    WHOLE, LATE, STOPPED = range(3)


_WHY = {
    Finish.WHOLE: "This host is slow or busy: there was no time for all arms.",
    Finish.LATE: "The time is over: this host is slow or busy.",
    Finish.STOPPED: "It was stopped.",
}
_ABOUT = {
    COLD: "the first answers of the engine that then has hits",
    NONE: "vLLM without kvtier",
    _RAM: "asked again, by the same engine",
    _RESTART: "asked again, after that engine was restarted",
}


class OutOfTimeError(SystemExit):
    """The bound is reached. asyncio lets a SystemExit out of a round that is under way."""


@dataclass(slots=True)
class Costs:
    """How fast this machine is, in seconds: an engine's start, a token of a prompt of 1,024, and an
    answer about a document that is cached."""

    start: float
    token: float
    hit: float

    def ram(self, tokens: int) -> float:
        return self.documents(tokens) + _SETTLE_S + self.hits

    def arm(self, arm: Arm, tokens: int) -> float:
        starts = (2 if arm.second_engine else 1) * self.starts(tokens)
        return starts + self.documents(tokens) + (self.hits + _SETTLE_S if arm.caches else 0.0)

    def starts(self, tokens: int) -> float:
        return self.start + self.document(tokens) / 2

    def documents(self, tokens: int) -> float:
        return _DOCUMENTS * self.document(tokens)

    def document(self, tokens: int) -> float:
        """Attention makes a token of a long document dearer: twice at 4,096 tokens."""
        return tokens * self.token * (0.7 + 0.3 * tokens / 1024)

    @property
    def hits(self) -> float:
        return _DOCUMENTS * self.hit


@dataclass(slots=True)
class Demo:
    args: argparse.Namespace
    bound_s: float
    rounds: list[Round] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.bound_s - _END_S - (time.monotonic() - self.begun)

    def fits(self, cost_s: float) -> bool:
        return cost_s * _MARGIN <= self.left_s

    def keep(self, ended: Round) -> None:
        long_doc_qa.keep(self.args, self.rounds, ended)

    def run(self) -> None:
        costs = self._story()
        for name in _MORE:
            arm = ARMS[name]
            is_there = not arm.beside or shutil.which(arm.beside[0])
            if not is_there or not self.fits(costs.arm(arm, self.args.document_length)):
                continue
            say(f"{name}: {arm.about}")
            self.keep(long_doc_qa.measure(self.args, arm))

    def _story(self) -> Costs:
        """One engine's life, with a restart in it: documents are computed, come from RAM, and come
        from NVMe."""
        begun = time.monotonic()
        arm = ARMS[_RESTART]
        arm = replace(arm, kvtier={**(arm.kvtier or {}), "VLLM_SERVER_DEV_MODE": "1"})
        with long_doc_qa.engines_of(self.args, arm) as (server, *_):
            start_s = time.monotonic() - begun
            asked = self._rounds(server, "kvtier").pre_warm_up()[-1]
            token_s = asked.latency / asked.prompt_tokens
            costs = Costs(start_s, token_s, _HIT_TOKENS * token_s)
            self._choose(costs)
            cold = self._rounds(server, "kvtier").cold()
            self.keep(cold)
            costs.token *= _mean_s(cold) / costs.document(self.args.document_length)
            time.sleep(_SETTLE_S)
            _empty_gpu_cache(server.base_url)
            ram = self._rounds(server, _RAM).query()
            self.keep(ram)
            costs.hit = _mean_s(ram)
            if not self.fits(costs.start + costs.hits):
                return costs
            begun = time.monotonic()
            with waiting(f"{_RESTART}: server restarts"):
                server.restart()
            costs.start = time.monotonic() - begun
            self.keep(self._rounds(server, _RESTART).query())
        return costs

    def conclude(self, finish: Finish) -> int:
        logs = f"Took {time.monotonic() - self.begun:.0f} s. Logs of the servers: "
        logs += str(self.args.output_dir / "servers")
        if not self.rounds:
            print(f"Nothing was measured. {_WHY[finish]}\n{logs}")
            return 1
        there = {one.arm for one in self.rounds}
        if NONE in there:
            self.rounds = [one for one in self.rounds if one.arm != COLD]
            self.rounds.sort(key=lambda one: one.arm != NONE)
        status = long_doc_qa.conclude(self.args, self.rounds, picture=finish is Finish.WHOLE)
        told = [f"{one.arm}: {_ABOUT[one.arm]}" for one in self.rounds if one.arm in _ABOUT]
        print("; ".join(told) + ".")
        missed = [name for name in (_RAM, _RESTART, *_MORE) if name not in there]
        if finish is not Finish.WHOLE or not {_RAM, _RESTART, NONE} <= there:
            print(f"{_WHY[finish]} Not measured: {', '.join(missed)}.")
        if missed:
            print(_MORE_TIME)
        print(logs)
        return status

    def _rounds(self, server: VllmServer, name: str) -> long_doc_qa.Rounds:
        return long_doc_qa.rounds_at(self.args, server, name)

    def _choose(self, costs: Costs) -> None:
        """The longest documents with which the story and the arm none fit. Where no length has room
        for both, the story alone, and then its part before the restart."""
        for names in ([_RAM, _RESTART, NONE], [_RAM, _RESTART], [_RAM]):
            for tokens in _LENGTHS_TOKENS:
                cost_s = costs.ram(tokens)
                if _RESTART in names:
                    cost_s += costs.start + costs.hits
                if NONE in names:
                    cost_s += costs.arm(ARMS[NONE], tokens)
                self.args.document_length = tokens
                if self.fits(cost_s):
                    self._announce(costs, names, cost_s)
                    return
        self._announce(costs, [_RAM], cost_s)

    def _announce(self, costs: Costs, names: list[str], cost_s: float) -> None:
        tokens = self.args.document_length
        for arm in [ARMS[name] for name in _MORE[1:] if NONE in names]:
            more = costs.arm(arm, tokens)
            if shutil.which(arm.beside[0]) and self.fits(cost_s + more):
                cost_s += more
                names.append(arm.name)
        whole_s = min(time.monotonic() - self.begun + cost_s, self.bound_s)
        minutes = max(1, round(whole_s / 60))
        many = f"{len(names)} arm{'s' * (len(names) > 1)}"
        say(f"{many}, about {minutes} minute{'s' * (minutes > 1)}: {', '.join(names)}")
        say(
            f"{_DOCUMENTS} documents of {tokens:,} tokens, because an engine starts in "
            f"{costs.start:.0f} s here and computes {1 / costs.token:,.0f} tokens a second"
        )


def _mean_s(ended: Round) -> float:
    return statistics.fmean(outcome.latency for outcome in ended.outcomes)


def _empty_gpu_cache(base_url: str) -> None:
    """Empty vLLM's own cache, as other prompts would. Blocks that are being saved keep theirs for a
    moment. Where it stays, the row says that hits came from the GPU."""
    request = urllib.request.Request(f"{base_url}/reset_prefix_cache", b"")
    for _ in range(_RESET_TRIES):
        with (
            contextlib.suppress(OSError, ValueError, KeyError),
            urllib.request.urlopen(request, timeout=60) as reply,
        ):
            if json.load(reply)["success"]:
                return
        time.sleep(_RESET_PAUSE_S)


@contextmanager
def _bounded(bound_s: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, bound_s))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(args: argparse.Namespace, bound_s: float) -> int:
    """The arms that fit into ``bound_s``. The exit status: 1 where nothing was measured, a request
    failed, or answers differ."""
    args.num_documents, args.repeat_count = _DOCUMENTS, 1
    say(f"At most {bound_s:,.0f} s. One engine is started and timed first.")
    finish = Finish.WHOLE
    with terminable():
        demo = Demo(args, bound_s)
        try:
            with _bounded(demo.left_s):
                demo.run()
        except OutOfTimeError:
            finish = Finish.LATE
        except BaseException:
            demo.conclude(Finish.STOPPED)
            raise
    return demo.conclude(finish)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="kvtier.bench.demo", description="Show what kvtier gains on this machine.")
    folder = Path("build/demo")
    about = f"for the model, results and logs (default: {folder})"
    parser.add_argument("--output-dir", type=Path, default=folder, help=about)
    about = f"the demo ends within so many (default: {_BOUND_S:.0f})"
    parser.add_argument("--seconds", type=seconds, default=_BOUND_S, metavar="S", help=about)
    about = "every arm at its full size, without a bound; flags of Long Doc QA may follow"
    parser.add_argument("--all", action="store_true", help=about)
    given, more = parser.parse_known_args(argv)
    if more and not given.all:
        parser.error(f"{more[0]}: flags of Long Doc QA go with --all")
    try:
        require("bench")
        model = make_model(given.output_dir / _MODEL, "demo")
        args = _arguments(model, given.output_dir, more)
        return (
            long_doc_qa.run(args)
            if given.all
            else run(chosen(args, Workload, PRESETS), given.seconds)
        )
    except KVTierError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _arguments(model: Path, folder: Path, more: Sequence[str]) -> argparse.Namespace:
    """The demo's arguments of Long Doc QA. ``more`` are flags that come after the demo's own, and
    so win."""
    parser = argparse.ArgumentParser(prog="kvtier.bench.demo")
    long_doc_qa.add_arguments(parser)
    return parser.parse_args(["--model", str(model), "--output-dir", str(folder), *_SHAPE, *more])


if __name__ == "__main__":
    sys.exit(main())
