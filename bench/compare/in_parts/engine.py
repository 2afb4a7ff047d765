"""An engine of vLLM's usual processes that is asked for documents: what it answers, and when."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from kvtier.bench.processes.engine import on_cpu
from kvtier.bench.processes.lines import REST_S, LineProcess, tell
from kvtier.core.pool import Pool

SWITCH = "kvtier.bench.compare.in_parts.switch"
WHOLE, BEGUN, POOL = "COMPARE_WHOLE", "COMPARE_BEGUN", "COMPARE_POOL"
"""Of that module: environment variables that name files."""
BLOCK = 32
_TAIL = 16
"""Tokens of a question behind its document."""
_LEAD, _QUIET = 2, 12
"""Tokens of a request that decodes before its gaps count, and before a document comes."""
_SHARE = 0.2
"""Of a GPU's memory, for each of the engines that are up at the same time."""


@dataclass(frozen=True, slots=True)
class Document:
    number: int
    tokens: int

    def question(self, number: int) -> dict[str, Any]:
        """One that nobody has asked."""
        parts = ((f"document {self.number}", self.tokens), (f"question {number}", _TAIL))
        drawn = [(random.Random(seed), count) for seed, count in parts]
        ids = [draw.randrange(10, 2000) for draw, count in drawn for _ in range(count)]
        return {"prompt_token_ids": ids}


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's. ``cache_bytes``: of its blocks. ``transfer``: vLLM's ``kv_transfer_config``."""

    model: str
    longest: int
    blocks: int
    cache_bytes: int
    step_tokens: int
    transfer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """To documents that only a tier has, and then to the same again, from vLLM's own cache.

    Attributes:
        loaded, warm: seconds to the first token of the last of them.
        cached: tokens of each that were not computed.
        begun: how many of them were loaded in parts.
        places: chunks that kvtier has loaded, by place.
        longest, lost: of the gaps between a decoding request's tokens meanwhile: the longest, and
            how much longer they were together than as many before. Without one: 0.
        warm_lost: the same of the second question.
    """

    loaded: float
    warm: float
    cached: list[int]
    begun: int
    places: dict[str, int]
    longest: float = 0.0
    lost: float = 0.0
    warm_lost: float = 0.0

    @property
    def cost(self) -> float:
        return self.loaded - self.warm


@dataclass(frozen=True, slots=True)
class Window:
    """A document's request, from its arrival to its first token, in seconds, beside a request that
    decodes. ``quiet``: the gaps between the other's tokens before. ``gaps``: those that lie in the
    window at least in part."""

    quiet: Sequence[float]
    gaps: Sequence[float]
    ttft: float
    cached: int

    @classmethod
    def of(cls, times: Sequence[float], arrival: float, ttft: float, cached: int) -> Window:
        """``times``: when each token of the other came."""
        until, pairs = arrival + ttft, list(pairwise(times))
        quiet = [after - before for before, after in pairs if after <= arrival]
        gaps = [after - before for before, after in pairs if after > arrival and before < until]
        return cls(quiet, gaps, ttft, cached)

    @property
    def lost(self) -> float:
        """How much longer the window's gaps took than as many quiet ones."""
        return sum(self.gaps) - len(self.gaps) * fmean(self.quiet)


class EngineProcess(LineProcess):
    """An engine in processes of its own. ``environment``: what is added to this process's.
    ``signs``: a folder in memory, for what the two tell one another while a load is measured."""

    def __init__(
        self, settings: Settings, environment: Mapping[str, str], log: Path, signs: Path
    ) -> None:
        words = [sys.executable, "-m", "kvtier.bench.compare.in_parts.engine"]
        call = json.dumps(asdict(settings))
        self._whole, begun, self._pool = (
            signs / f"{log.stem}.{kind}" for kind in ("whole", "begun", "pool")
        )
        own = {WHOLE: str(self._whole), BEGUN: str(begun), POOL: str(self._pool)}
        super().__init__([*words, call], os.environ | own | dict(environment), log)

    def fill(self, documents: Sequence[Document]) -> list[float]:
        seconds: list[float] = self._do("fill", documents)
        return seconds

    def ask(
        self, documents: Sequence[Document], *, in_parts: bool = True, beside: bool = False
    ) -> Answer:
        """Documents at the same time. ``beside``: one, while another request decodes."""
        if in_parts:
            self._whole.unlink(missing_ok=True)
        else:
            self._whole.touch()
        time.sleep(REST_S)
        return Answer(**self._do("beside" if beside else "ask", documents))

    def pool(self) -> Pool:
        """The slots into which its last load in parts was read."""
        path, slots, slot_bytes = json.loads(self._pool.read_text())
        return Pool.attach(path, slots, slot_bytes)

    def _do(self, what: str, documents: Sequence[Document]) -> Any:
        return self.say(json.dumps([what, [asdict(one) for one in documents]]))


class _Vllm:
    def __init__(self, settings: Settings) -> None:
        from vllm import LLM, SamplingParams

        memory = {"gpu_memory_utilization": _SHARE, "kv_cache_memory_bytes": settings.cache_bytes}
        self._llm = LLM(
            settings.model,
            dtype="bfloat16",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=settings.longest + 2 * BLOCK,
            num_gpu_blocks_override=settings.blocks,
            max_num_batched_tokens=settings.step_tokens,
            disable_log_stats=False,
            kv_transfer_config=dict(settings.transfer),
            **({} if on_cpu() else memory),
        )
        self._sampled = SamplingParams
        self._asked = 0
        self._begun = Path(os.environ[BEGUN])

    def fill(self, documents: Sequence[Document]) -> list[float]:
        return [self._first_tokens([one])[0] for one in documents]

    def ask(self, documents: Sequence[Document]) -> dict[str, Any]:
        return self._twice(lambda: self._first_tokens(documents))

    def beside(self, documents: Sequence[Document]) -> dict[str, Any]:
        (document,) = documents
        windows: list[Window] = []

        def asked() -> tuple[float, list[int]]:
            windows.append(self._window(document))
            return windows[-1].ttft, [windows[-1].cached]

        told = self._twice(asked)
        loaded, warm = windows
        return told | {
            "longest": max(loaded.gaps),
            "lost": loaded.lost,
            "warm_lost": warm.lost,
        }

    def _twice(self, asked: Callable[[], tuple[float, list[int]]]) -> dict[str, Any]:
        while not self._llm.reset_prefix_cache():
            time.sleep(0.01)  # blocks are freed one step after their request
        begun, places = self._parts(), self._places()
        loaded, cached = asked()
        begun = self._parts() - begun
        places = self._places() - places
        warm, _ = asked()
        return {
            "loaded": loaded,
            "warm": warm,
            "cached": cached,
            "begun": begun,
            "places": places,
        }

    def _first_tokens(self, documents: Sequence[Document]) -> tuple[float, list[int]]:
        """Seconds until all have theirs, and the tokens of each that were not computed."""
        prompts = [self._question(one) for one in documents]
        begun = time.perf_counter()
        outputs = self._llm.generate(prompts, self._answers(1), use_tqdm=False)
        return time.perf_counter() - begun, [one.num_cached_tokens for one in outputs]

    def _window(self, document: Document) -> Window:
        engine = self._llm.llm_engine
        decoding, coming = f"decodes {self._asked}", f"comes {self._asked}"
        engine.add_request(decoding, self._question(Document(-1, 0)), self._answers(512))
        times: list[float] = []
        while len(times) < _QUIET:
            times += [time.perf_counter() for one in engine.step() if one.request_id == decoding]
        arrival = time.perf_counter()
        answer: Any = None
        engine.add_request(coming, self._question(document), self._answers(1))
        while answer is None:
            for one in engine.step():
                if one.request_id == coming:
                    answer = one
                else:
                    times.append(time.perf_counter())
        ttft = time.perf_counter() - arrival
        after = len(times)
        while len(times) == after:  # the gap in which the answer came
            times += [time.perf_counter() for one in engine.step() if one.request_id == decoding]
        engine.abort_request([decoding])
        while engine.has_unfinished_requests():
            engine.step()
        return Window.of(times[_LEAD:], arrival, ttft, answer.num_cached_tokens)

    def _question(self, document: Document) -> dict[str, Any]:
        self._asked += 1
        return document.question(self._asked)

    def _answers(self, tokens: int) -> Any:
        return self._sampled(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)

    def _parts(self) -> int:
        return self._begun.stat().st_size if self._begun.exists() else 0

    def _places(self) -> Counter[str]:
        """Chunks loaded so far, by place. A server's are known once it has served some."""
        return Counter(
            {
                metric.labels["place"]: int(metric.value)
                for metric in self._llm.get_metrics()
                if metric.name == "vllm:kvtier_loaded_chunks"
            }
        )


def main() -> None:
    engine = _Vllm(Settings(**json.loads(sys.argv[1])))
    tell("ready")
    for line in sys.stdin:
        what, documents = json.loads(line)
        tell(getattr(engine, what)([Document(**one) for one in documents]))


if __name__ == "__main__":
    main()
