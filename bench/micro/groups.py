"""What it costs to say how much of a prompt can be served, by the cache groups of a model.

``python -m kvtier.bench.micro.groups`` measures the scheduler's half in this process. It begins
with the keys of a prompt of 32,768 tokens (128 chunks of 256), which are all in RAM, and ends with
the promise to vLLM, claim included. Each round names the chunks anew, as a new request does: keys
that are the same objects as those in RAM are found faster. One case has one group of full
attention, and the others have more groups. The cases take turns, so that the state of the machine
is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

from kvtier.bench.flags import described
from kvtier.bench.report import Row, print_rows, spread, write_results
from kvtier.connectors.vllm.groups import Geometry, Group, Kind
from kvtier.connectors.vllm.scheduler_side.claims import Claims
from kvtier.connectors.vllm.scheduler_side.partial_tails import PartialTails
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.pool import Pool
from kvtier.load_policy.decide import LoadPolicy
from kvtier.load_policy.prefill import Prefill, PrefillTime
from kvtier.store.store import Store

CHUNK, CHUNKS, BLOCK, SLOT = 256, 128, 16, 4096
TOKENS = [*range(CHUNK * CHUNKS + BLOCK + 1)]
LAYOUT = ChunkLayout(fingerprint({"benchmark": "groups"}), CHUNK, BLOCK, (16,))


def _windows(reach: int, count: int) -> tuple[Group, ...]:
    return tuple(Group(number, Kind.WINDOW, BLOCK, reach) for number in range(1, count + 1))


CASES = {
    "one group of full attention": (Group(0, Kind.FULL, BLOCK),),
    "five windows of 1,024 tokens beside it, as Gemma 3": (
        Group(0, Kind.FULL, BLOCK),
        *_windows(1024, 5),
    ),
    "a window of 128 tokens beside it, as gpt-oss": (Group(0, Kind.FULL, BLOCK), *_windows(128, 1)),
    "three states beside it, as Qwen3-Next": (
        Group(0, Kind.FULL, CHUNK),
        *(Group(number, Kind.STATE, CHUNK) for number in range(1, 4)),
    ),
}


def promising(groups: tuple[Group, ...]) -> Callable[[], float]:
    """Make one promise for a new request. The seconds that it took."""
    geometry = Geometry(groups, CHUNK)
    run = geometry.run(LAYOUT.keys(TOKENS), 0, CHUNK * CHUNKS)
    store, load_policy = (
        Store(Pool(len(run.keys), SLOT)),
        LoadPolicy(60.0, prefill=Prefill(PrefillTime(1e-3))),
    )
    with store.save(run.keys) as lease:
        lease.commit()
    request = SimpleNamespace(
        request_id="one", num_tokens=len(TOKENS), num_prompt_tokens=len(TOKENS)
    )

    tails = PartialTails(store, geometry, 0)

    def once() -> float:
        prompt, keys = Prompt(request, None), LAYOUT.keys(TOKENS)
        claims = Claims(store, geometry, load_policy, {"one": prompt}, tails)
        begun = time.perf_counter()
        promised = claims.promise(prompt, keys, 0, busy=False, first=True)
        seconds = time.perf_counter() - begun
        assert promised == CHUNK * CHUNKS, "all of it is there"
        prompt.claim.drop()
        return seconds

    return once


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--output", default="bench/results/groups.json")
    arguments = parser.parse_args()
    works = {name: promising(groups) for name, groups in CASES.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(arguments.rounds):
        for name, work in works.items():
            times[name].append(work() * 1e3)
    alone = spread(next(iter(times.values())))[0]
    rows = []
    for name, found in times.items():
        median, low, high = spread(found)
        rows.append(
            Row(name, median, "ms", limit=alone, ratio=round(median / alone, 3), min=low, max=high)
        )
    write_results(arguments.output, "groups", rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
