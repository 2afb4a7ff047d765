"""Never slower: vLLM's time to the first token when hits come from a tier that is slower than
computing.

    python -m kvtier.bench.throttled [--rounds 3] [--slow 3.0]

Three engines are asked for the same documents in turn, so that a disturbance disturbs all of them:
``none`` (vLLM without a connector), ``always`` (kvtier, which loads every hit) and ``auto`` (kvtier
with its defaults). RAM keeps one document, and Redis all of them, behind a proxy. Three phases:

- Fast, after one cold round: ``auto`` must lose nothing against ``always``.
- Slow: the proxy lets a document's KV through in ``--slow`` times what computing it takes. ``auto``
  must stay within 3 % of ``none``. Its first answers, from which it learns, are included.
- Fast again: how many answers it takes until ``auto`` is served from Redis again.

Two processes of the very same engine differ by up to a tenth in speed for as long as they live. So
before each phase the engines are also asked with kvtier kept out of it (``kvtier.cache: false``). A
ratio between two engines is divided by the ratio that they have then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bench.flags import described
from kvtier.bench.model import kv_token_bytes, make_model, read_config
from kvtier.bench.processes.companion import redis_server
from kvtier.bench.processes.lines import REST_S, LineProcess, tell
from kvtier.bench.report import Row, median_row, print_rows, write_results
from kvtier.cli.launch import TRANSFER
from kvtier.connectors.vllm import LOAD_EVERY_HIT

GOAL = 1.03
_ARMS = ("none", "always", "auto")
_FAST_ROUNDS = 3
_DOCUMENTS, _TOKENS = 4, 2048 + 64
"""Documents, and tokens of each."""
_APART = 6
"""Documents for which kvtier is kept out of it, for each engine and phase."""
_CHUNK_TOKENS = 128
_PIECE = 64 << 10


class Answer(NamedTuple):
    seconds: float
    cached: int
    """Tokens that were not computed."""


# ---- an engine, in a process of its own ----------------------------------------------------------


def serve_documents(model: str, tokens: int, arm: str) -> None:
    """Answer numbers of documents from stdin with TTFT and cached tokens until it ends, then with
    all counts. A negative one is asked with kvtier kept out of it."""
    from vllm import LLM, SamplingParams

    every = {"kv_connector_extra_config": {LOAD_EVERY_HIT: arm == "always"}}
    more: dict[str, Any] = {"kv_transfer_config": TRANSFER | every} if arm != "none" else {}
    # one document and a little: vLLM's own cache never has the next one
    blocks = -(-tokens // 128) + 4
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        block_size=128,
        max_model_len=tokens + 128,
        num_gpu_blocks_override=blocks,
        disable_log_stats=False,
        **more,
    )
    apart = {"kv_transfer_params": {"kvtier.cache": False}}
    settings = [
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=more)
        for more in (None, apart)
    ]
    vocabulary = llm.get_tokenizer().vocab_size
    tell("ready")
    for line in sys.stdin:
        draw = random.Random(line)  # of a number its sign would be lost
        prompt: Any = {"prompt_token_ids": [draw.randrange(10, vocabulary) for _ in range(tokens)]}
        begun = time.perf_counter()
        (output,) = llm.generate(prompt, settings[int(line) < 0], use_tqdm=False)
        tell([time.perf_counter() - begun, output.num_cached_tokens])
    counts = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:kvtier_"):
            label = metric.labels.get("reason") or metric.labels.get("place")
            name = f"{metric.name.removeprefix('vllm:kvtier_')} {label}"
            counts[name] = int(getattr(metric, "value", 0))
    tell(counts)


class Arm(LineProcess):
    def __init__(
        self,
        arm: str,
        model: Path,
        tokens: int,
        tier: Mapping[str, str],
        log: Path,
        command: Sequence[str] = ("kvtier.bench.throttled",),
    ) -> None:
        """``tier``: the environment that names its lower tier. ``command``: the module that serves
        documents, and its flags."""
        chunk = _CHUNK_TOKENS * kv_token_bytes(read_config(model), 4)
        # With a connector vLLM reserves other CPU cores than without: all arms get the same.
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "KVTIER_CHUNK_TOKENS": str(_CHUNK_TOKENS),
            "KVTIER_RAM_BYTES": str((tokens // _CHUNK_TOKENS + 2) * chunk),
        }
        environment |= tier
        call = json.dumps([str(model), tokens, arm])
        words = [sys.executable, "-m", *command, "--engine", call]
        super().__init__(words, environment, log)

    def ask(self, document: int) -> Answer:
        time.sleep(REST_S)
        return Answer(*self.say(str(document)))

    def finish(self) -> dict[str, int]:
        self.end()
        counts: dict[str, int] = self.hear()
        return counts


def redis_tier(arm: str, port: int) -> dict[str, str]:
    """A Redis on this port, shared with other arms, under this one's own namespace."""
    return {
        "KVTIER_REDIS_URL": f"redis://127.0.0.1:{port}",
        "KVTIER_REDIS_BYTES": "4GiB",
        "KVTIER_NAMESPACE": arm,
    }


# ---- a slow network ------------------------------------------------------------------------------


class Throttle:
    """A TCP proxy on a loopback port. Its answers share one bandwidth. It runs on a thread of its
    own. ``rate``: bytes a second, or None for no limit. It may change at any time."""

    def __init__(self, to_port: int) -> None:
        self.rate: float | None = None
        self.port = 0
        self._to_port = to_port
        self._free_at = 0.0
        self._loop: asyncio.AbstractEventLoop
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _listen(self) -> None:
        """Wait until it has ended. What still goes through then is cut off."""
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self._to_port)
        pipes = self._pipe(reader, to_redis, False), self._pipe(from_redis, writer, True)
        with contextlib.suppress(asyncio.CancelledError):  # asyncio would print what was cut off
            await asyncio.gather(*pipes)

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slowed: bool
    ) -> None:
        try:
            while piece := await reader.read(_PIECE):
                if slowed and self.rate is not None:
                    self._free_at = max(self._free_at, self._loop.time()) + len(piece) / self.rate
                    await asyncio.sleep(self._free_at - self._loop.time())
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


# ---- the experiment ------------------------------------------------------------------------------


Engines = Mapping[str, Arm]


Answers = dict[str, list[Answer]]


class Phase(NamedTuple):
    """``apart``: the same engines' answers just before the phase, with kvtier kept out of it."""

    answers: Answers
    apart: Answers

    def later(self) -> Phase:
        return Phase({arm: given[1:] for arm, given in self.answers.items()}, self.apart)

    def luck(self, arm: str, against: str) -> float:
        """How much slower one process is than the other without kvtier."""
        middle = {
            one: statistics.median(answer.seconds for answer in self.apart[one])
            for one in (arm, against)
        }
        return middle[arm] / middle[against]


def ask_all(engines: Engines, documents: int, rounds: int, arms: Sequence[str] = _ARMS) -> Phase:
    """Every document in turn, by every arm. The order is drawn anew each time, so that what one arm
    leaves running in the background does not always meet the same other arm."""
    before = asked_apart(engines, arms)
    return Phase(asked(engines, [*range(documents)] * rounds, arms), before)


def asked_apart(engines: Engines, arms: Sequence[str]) -> Answers:
    return asked(engines, [-1 - document for document in range(_APART)], arms, ", kvtier kept out")


def asked(
    engines: Engines, documents: Sequence[int], arms: Sequence[str], how: str = ""
) -> Answers:
    answers: Answers = {arm: [] for arm in arms}
    draw = random.Random(len(documents))
    for document in documents:
        for arm in draw.sample(arms, len(arms)):
            answers[arm].append(engines[arm].ask(document))
    for arm, given in answers.items():
        middle = statistics.median(answer.seconds for answer in given)
        cached = statistics.mean(answer.cached for answer in given)
        print(f"  {arm:7} {middle:.3f} s, {cached:.0f} tokens cached{how}", flush=True)
    return answers


def until_hit(engines: Engines, documents: int, most: int) -> int:
    """Number of answers of ``auto`` until one comes from the tier. ``most`` + 1 if none
    did."""
    for count in range(1, most + 1):
        if engines["auto"].ask(count % documents).cached:
            return count
    return most + 1


def rows_of(phase: str, heard: Phase, against: str, limit: float | None) -> list[Row]:
    """One row for each arm. The ratio is to the arm ``against``: the median of the pairs for the
    same document."""
    rows = []
    for arm, given in heard.answers.items():
        pairs = zip(given, heard.answers[against], strict=True)
        luck = heard.luck(arm, against)
        ratio = statistics.median(one.seconds / other.seconds for one, other in pairs) / luck
        bound, times = limit if arm == "auto" else None, [answer.seconds for answer in given]
        rows.append(median_row(f"{phase}: TTFT, {arm}", times, "s", bound, ratio))
        if arm != against:
            rows.append(Row(f"{phase}: TTFT without kvtier in it, {arm} / {against}", luck, ""))
    return rows


def sum_ratio(heard: Phase, arm: str, against: str) -> float:
    total = {one: sum(answer.seconds for answer in heard.answers[one]) for one in (arm, against)}
    return total[arm] / total[against] / heard.luck(arm, against)


def run(given: argparse.Namespace) -> None:
    model = make_model("build/models/demo", "demo")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        port, _, _ = stack.enter_context(redis_server())
        throttle, engines = Throttle(int(port)), dict[str, Arm]()
        stack.callback(throttle.close)
        for arm in _ARMS:
            tier, log = redis_tier(arm, throttle.port), folder / f"{arm}.log"
            engines[arm] = Arm(arm, model, _TOKENS, tier, log)
            stack.callback(engines[arm].stop)
        for engine in engines.values():
            engine.hear()
        print("cold:")
        cold = ask_all(engines, _DOCUMENTS, 1)
        computing = statistics.median(answer.seconds for answer in cold.answers["none"])
        print("fast tier:")
        fast = ask_all(engines, _DOCUMENTS, _FAST_ROUNDS, ("always", "auto"))
        rate = _TOKENS * kv_token_bytes(read_config(model), 4) / (given.slow * computing)
        throttle.rate = rate
        print(f"slow tier, {rate / 1e6:.1f} MB/s:")
        slow = ask_all(engines, _DOCUMENTS, given.rounds)
        throttle.rate = None
        recovered = until_hit(engines, _DOCUMENTS, 20)
        counts = {arm: engines[arm].finish() for arm in ("always", "auto")}
    rows = [
        *rows_of("cold", cold, "none", None),
        *rows_of("fast tier", fast, "always", GOAL),
        *rows_of("slow tier", slow, "none", GOAL),
        Row("slow tier: sum of all TTFT, auto / none", sum_ratio(slow, "auto", "none"), "", GOAL),
        Row("fast again: answers until auto is served by the tier", recovered, "answers"),
    ]
    more = {"tokens": _TOKENS, "model": "demo", "rate_bytes_per_second": rate}
    write_results(given.output, "throttled", rows, counts=counts, **more)
    print_rows(rows)
    print(f"counts: {counts}")


def main() -> None:
    parser = described(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="times every document is asked in the slow phase")
    about = "how many times slower the tier is than computing"
    add("--slow", type=float, default=3.0, help=about)
    add("--output", default="bench/results/throttled.json")
    add("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        serve_documents(*json.loads(given.engine))
    else:
        run(given)


if __name__ == "__main__":
    main()
