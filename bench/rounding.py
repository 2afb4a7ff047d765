"""Whether vLLM alone gives a prompt the same answer whatever else is in its batch. It asks Long Doc
QA's questions without kvtier.

``python -m kvtier.bench.rounding --model build/bench-lmi/kvtier-lmi`` asks one engine the questions
of ``--preset lmi`` in each of :data:`WAYS`, and compares the answers. Where two ways differ, it
gives the margin: by how much one token was likelier than the next at the place where the answers
part. A comparison of answers with and without kvtier cannot tell such a difference from a wrong
answer.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtier.bench.flags import described
from kvtier.bench.long_doc_qa.flags import DEFAULTS, PRESETS
from kvtier.bench.long_doc_qa.work import Workload
from kvtier.bench.model import generated_text
from kvtier.bench.report import Row, print_rows, write_results

_BLOCK = 128
_STEP_TOKENS = 2048  # vLLM's server has this by default on CPUs. The class LLM has another.
_SAMPLE_WORDS = 4000


class Way(NamedTuple):
    """How questions are asked. ``hits``: the engine's own prefix cache is read."""

    hits: bool
    in_flight: bool

    def __str__(self) -> str:
        return (
            f"{'hits' if self.hits else 'computed'}, "
            f"{'several in flight' if self.in_flight else 'one by one'}"
        )


WAYS = (
    Way(hits=False, in_flight=True),
    Way(hits=True, in_flight=True),
    Way(hits=True, in_flight=False),
)
"""The first way fills the engine's own prefix cache for the others. Long Doc QA asks as the first
does where it has no cache, and as the second does where it has one."""


class Answer(NamedTuple):
    tokens: list[int]
    margins: list[float]
    """By how much each token was likelier than the next, as the difference of their logarithms."""


class Parting(NamedTuple):
    """Where two answers to the ``question``-th prompt first differ, and each one's margin there."""

    question: int
    token: int
    margins: tuple[float, float]


def ask(llm: Any, prompts: Sequence[Any], way: Way, tokens: int) -> list[Answer]:
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=2,
        skip_reading_prefix_cache=not way.hits,
    )
    batches = [prompts] if way.in_flight else [[prompt] for prompt in prompts]
    outputs = [
        output for batch in batches for output in llm.generate(batch, settings, use_tqdm=False)
    ]
    for output in outputs:
        if bool(output.num_cached_tokens) != way.hits:
            raise SystemExit(
                f"{way}: {output.num_cached_tokens} tokens of a prompt came from the prefix cache"
            )
    return [
        Answer(list(output.outputs[0].token_ids), _margins(output.outputs[0])) for output in outputs
    ]


def _margins(output: Any) -> list[float]:
    likely = [
        sorted((one.logprob for one in step.values()), reverse=True) for step in output.logprobs
    ]
    return [first - second for first, second, *_ in likely]


def differing(one: Sequence[Answer], other: Sequence[Answer]) -> list[Parting]:
    found = []
    for question, (left, right) in enumerate(zip(one, other, strict=True)):
        pairs = enumerate(zip(left.tokens, right.tokens, strict=True))
        token = next((index for index, (first, second) in pairs if first != second), None)
        if token is not None:
            found.append(Parting(question, token, (left.margins[token], right.margins[token])))
    return found


def compared(answers: dict[Way, list[Answer]]) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows, and every answer that differs."""
    rows, partings = [], []
    for one, other in itertools.combinations(answers, 2):
        found = differing(answers[one], answers[other])
        between = f"{one} | {other}"
        rows.append(
            Row(f"{between}: answers that differ", len(found), "answers", limit=len(answers[one]))
        )
        if found:
            widest = max(max(parting.margins) for parting in found)
            rows.append(Row(f"{between}: widest margin where they part", widest, "log"))
        partings += [{"between": between, **parting._asdict()} for parting in found]
    margins = [margin for answer in answers[WAYS[0]] for margin in answer.margins]
    rows.append(Row(f"{WAYS[0]}: narrowest margin of all tokens", min(margins), "log"))
    for bound in (1e-3, 1e-4, 1e-5):
        within = sum(margin < bound for margin in margins)
        rows.append(
            Row(
                f"{WAYS[0]}: tokens with a margin below {bound:g}",
                within,
                "tokens",
                limit=len(margins),
            )
        )
    return rows, partings


def main() -> None:
    parser = described(__doc__)
    shape: dict[str, Any] = {**DEFAULTS, **PRESETS["lmi"]}
    parser.add_argument("--model", required=True)
    for name in ("num_documents", "document_length", "output_len"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=shape[name])
    parser.add_argument("--output", default="bench/results/rounding.json")
    arguments = vars(parser.parse_args())
    model, output = arguments.pop("model"), arguments.pop("output")
    shape |= arguments
    llm, workload = engine(model, shape)
    prompts = [{"prompt_token_ids": list(asked.prompt)} for asked in workload.queries()]
    answers = dict[Way, list[Answer]]()
    for way in WAYS:
        answers[way] = ask(llm, prompts, way, workload.output_len)
        print(f"{way}: {len(prompts)} questions asked", flush=True)
        rows, partings = compared(answers)
        write_results(output, "rounding", rows, workload=shape, partings=partings)
    print_rows(rows)


def engine(model: str, shape: dict[str, Any]) -> tuple[Any, Workload]:
    """vLLM alone with room for all documents, and the workload."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "6",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    }
    from vllm import LLM

    batch = {"max_num_seqs": shape["max_inflight_requests"], "max_num_batched_tokens": _STEP_TOKENS}
    llm = LLM(model, dtype="float32", enforce_eager=True, block_size=_BLOCK, **batch)
    text = generated_text(_SAMPLE_WORDS, seed=0)
    words = sorted(set(llm.get_tokenizer().encode(text, add_special_tokens=False)))
    work = {name: value for name, value in shape.items() if name != "max_inflight_requests"}
    return llm, Workload(words, **work)


if __name__ == "__main__":
    main()
