"""The benchmarks' client: it streams completions from an OpenAI-compatible server, and reads the
server's hit counters."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvtier.bench.model import generated_text
from kvtier.core.errors import KVTierError

if TYPE_CHECKING:
    import aiohttp

Prompt = Sequence[int | str] | str


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``document`` is the index of the document, and ``question`` the index of the
    question about it. ``params``: its ``kv_transfer_params``. ``salt``: its ``cache_salt``.
    Empty ones are not sent. ``logprobs``: of so many likeliest tokens, which vLLM is asked for.
    ``may_end``: the answer may be shorter than ``output_len``."""

    document: int
    question: int
    prompt: Prompt
    output_len: int
    params: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""
    logprobs: int = 0
    may_end: bool = False


def draw(words: Sequence[int | str], length: int, seed: int, what: object) -> list[int | str]:
    """``length`` words. ``what`` names the text: another name gives other words."""
    return random.Random(f"{seed}/{what}").choices(words, k=length)


def as_prompt(words: Sequence[int | str]) -> Prompt:
    return " ".join(map(str, words)) if isinstance(words[0], str) else list(words)


TIERS = {
    "device": "gpu",
    "host": "ram",
    "disk": "nvme",
    "p2p": "redis",
    "external_unspecified": "unknown",
}
"""vLLM's names of the place of a hit, and ours. kvtier's Redis tier reports itself as a peer."""

_BY_SOURCE = re.compile(
    r'^vllm:prompt_tokens_cached_by_source_total\{[^}]*source="(\w+)"[^}]*\} (\S+)', re.MULTILINE
)
_SPAN_TOKENS = re.compile(
    r'^vllm:kvtier_span_tokens_total\{[^}]*kind="(\w+)"[^}]*\} (\S+)', re.MULTILINE
)
_TOTALS = {
    "gpu": "vllm:prefix_cache_hits_total",
    "unknown": "vllm:external_prefix_cache_hits_total",
}
_SAMPLE_WORDS = 4000
ENGINE_HEADER = "X-Engine"
"""A router names the engine of an answer with it (deploy/routing)."""


class RequestError(KVTierError):
    """The server does not answer, or answers with an error. The message quotes it."""


@dataclass(slots=True)
class Outcome:
    """One request as measured. Times are seconds from the start of its round. ``tokens``: the
    answer's ids where the server gives them. ``cached_tokens``: None where the server does not say.
    ``engine``: who answered, where a router says so. ``first``: log-probabilities of the likeliest
    first tokens, where they were asked for."""

    document: int
    question: int
    request_start: float
    ttft: float | None = None
    request_end: float = 0.0
    successful: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    engine: str = ""
    first: dict[str, float] = field(default_factory=dict)

    @property
    def latency(self) -> float:
        return self.request_end - self.request_start

    @property
    def answer(self) -> tuple[int, ...] | str:
        return tuple(self.tokens) or self.text


@dataclass(frozen=True, slots=True)
class Client:
    """A server, and how it is asked. ``vllm``: it knows vLLM's additions (token ids in and out,
    answers of exactly the length asked for). ``version``: vLLM's, where the server says."""

    base_url: str
    model: str
    vllm: bool
    timeout_s: float
    version: str | None = None

    def run(self, asks: Sequence[Ask], inflight: int, on_done: Callable[[], None]) -> list[Outcome]:
        """One round: at most ``inflight`` requests at a time, which begin in order. A failed
        request is an Outcome too."""
        return asyncio.run(self._run(asks, inflight, on_done))

    async def _run(
        self, asks: Sequence[Ask], inflight: int, on_done: Callable[[], None]
    ) -> list[Outcome]:
        import aiohttp

        free = asyncio.Semaphore(inflight)
        begun = time.perf_counter()
        limits = aiohttp.ClientTimeout(total=self.timeout_s)

        async def one(ask: Ask) -> Outcome:
            async with free:
                outcome = Outcome(ask.document, ask.question, time.perf_counter() - begun)
                await self.ask(session, ask, outcome, begun)
                on_done()
                return outcome

        async with aiohttp.ClientSession(timeout=limits, read_bufsize=2**20) as session:
            return list(await asyncio.gather(*map(one, asks)))

    async def ask(
        self, session: aiohttp.ClientSession, ask: Ask, outcome: Outcome, begun: float
    ) -> None:
        """One request, into ``outcome``. A failure is in there too."""
        import aiohttp

        try:
            await self._stream(session, ask, outcome, begun)
        except (aiohttp.ClientError, TimeoutError, RequestError, ValueError) as error:
            outcome.successful, outcome.error = False, f"{type(error).__name__}: {error}"
        outcome.request_end = time.perf_counter() - begun

    async def _stream(
        self, session: aiohttp.ClientSession, ask: Ask, outcome: Outcome, begun: float
    ) -> None:
        async with session.post(f"{self.base_url}/v1/completions", json=self._body(ask)) as reply:
            if reply.status != 200:
                raise RequestError(f"HTTP {reply.status}: {(await reply.text())[:500]}")
            outcome.engine = reply.headers.get(ENGINE_HEADER, "")
            async for line in reply.content:
                if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[5:])
                _take(event, outcome)
                if outcome.ttft is None and (outcome.tokens or outcome.text):
                    outcome.ttft = time.perf_counter() - begun - outcome.request_start
        outcome.successful = outcome.ttft is not None
        if not outcome.successful:
            outcome.error = outcome.error or "the server answered without a single token"

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        named: dict[str, Any] = {"kv_transfer_params": dict(ask.params)} if ask.params else {}
        named |= {"cache_salt": ask.salt} if ask.salt else {}
        if ask.logprobs:
            named |= {"logprobs": ask.logprobs, "return_tokens_as_token_ids": True}
        whole = {"ignore_eos": not ask.may_end, "return_token_ids": True}
        return body | named | (whole if self.vllm else {})


def _take(event: dict[str, Any], outcome: Outcome) -> None:
    """Add one streamed event to its request's outcome."""
    if "error" in event:
        raise RequestError(json.dumps(event["error"])[:500])
    for choice in event.get("choices", ()):
        outcome.tokens += choice.get("token_ids") or ()
        outcome.text += choice.get("text") or ""
        told = (choice.get("logprobs") or {}).get("top_logprobs")
        if told and not outcome.first:
            outcome.first = dict(told[0])
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.output_tokens = usage.get("completion_tokens", 0)
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get(
            "cached_tokens", outcome.cached_tokens
        )


def connect(
    base_url: str, model: str | None, timeout_s: float
) -> tuple[Client, Sequence[int | str]]:
    """A client for the server, and the words to make prompts of. They are token ids where the
    server has vLLM's ``/tokenize``, without special tokens, and made-up words otherwise. Raises
    RequestError when the server does not answer."""
    base_url = base_url.rstrip("/").removesuffix("/v1")
    if model is None:
        model = str(_ask(f"{base_url}/v1/models")["data"][0]["id"])
    text, client = generated_text(_SAMPLE_WORDS, seed=0), Client(base_url, model, True, timeout_s)
    try:
        tokens = tokenize(client, text)
    except (RequestError, KeyError, TypeError):
        return replace(client, vllm=False), sorted(set(text.split()))
    return replace(client, version=_version(base_url)), sorted(set(tokens))


def all_succeeded(who: str, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """The outcomes. Raises RequestError when a request failed: what follows would measure
    nothing."""
    for outcome in outcomes:
        if not outcome.successful:
            raise RequestError(f"{who}: a request before the query round failed: {outcome.error}")
    return outcomes


def answers(outcomes: Sequence[Outcome]) -> dict[tuple[int, int], tuple[int, ...] | str]:
    return {(one.document, one.question): one.answer for one in outcomes if one.successful}


def differing(one: Mapping[Any, object], other: Mapping[Any, object]) -> int:
    """Number of questions with another answer, or with an answer in one of the two only."""
    return sum(one.get(asked) != other.get(asked) for asked in one.keys() | other.keys())


def hits_between(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, float] | None:
    """Tokens by tier. None where the server did not say at both times."""
    if before is None or after is None:
        return None
    return {tier: tokens - before.get(tier, 0.0) for tier, tokens in after.items()}


def tokenize(client: Client, text: str) -> list[int]:
    """Token ids, without special tokens. Raises RequestError where a server has no ``/tokenize``,
    which vLLM's own server has."""
    body = {"model": client.model, "prompt": text, "add_special_tokens": False}
    return list(_ask(f"{client.base_url}/tokenize", body)["tokens"])


def _version(base_url: str) -> str | None:
    try:
        return str(_ask(f"{base_url}/version")["version"])
    except (RequestError, KeyError, TypeError):
        return None


def hit_counters(base_url: str) -> dict[str, float] | None:
    """Prompt tokens that came from each tier so far. None where the server does not say."""
    try:
        return parse_hits(_metrics(base_url))
    except RequestError:
        return None


def parse_hits(metrics: str) -> dict[str, float] | None:
    """Tokens by tier from vLLM's Prometheus text, the sum over engines. Versions before 0.32 tell
    only their own cache from a connector's, which is then ``unknown``."""
    hits: dict[str, float] = {}
    for source, value in _BY_SOURCE.findall(metrics):
        tier = TIERS.get(source, "unknown")
        hits[tier] = hits.get(tier, 0.0) + float(value)
    if hits:
        return hits
    for tier, name in _TOTALS.items():
        values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)", metrics, re.MULTILINE)
        if values:
            hits[tier] = sum(map(float, values))
    return hits or None


def span_tokens(base_url: str) -> Counter[str]:
    """Prompt tokens that kvtier took from homes (``moved``) and that it computed in place
    (``computed``) so far. vLLM counts both as cached. Raises RequestError when the server does not
    answer."""
    told = Counter[str]()
    for kind, value in _SPAN_TOKENS.findall(_metrics(base_url)):
        told[kind] += int(float(value))
    return told


def _metrics(base_url: str) -> str:
    try:
        with urllib.request.urlopen(f"{base_url}/metrics", timeout=30) as reply:
            return str(reply.read().decode())
    except (urllib.error.URLError, OSError) as error:
        raise RequestError(f"{base_url}/metrics does not answer: {error}") from error


def _ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise RequestError(
            f"{url} does not answer as an OpenAI-compatible server does: {error}"
        ) from error
