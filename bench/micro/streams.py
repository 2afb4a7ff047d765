"""What following engines costs a kvtier server, and what a lookup over them costs.

``python -m kvtier.bench.micro.streams``. Times are CPU time. vLLM's messages are decoded
and applied as the server does it. Then prompts are looked up of which the engine has everything.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import tracemalloc

import msgspec

from kvtier.bench.flags import described, positive
from kvtier.core.steps import whole
from kvtier.extensions.engine_index.picture import Picture, PromptBlocks
from kvtier.protocol import kv_events

_BLOCK, _IN_PROMPT = 16, 512


def main() -> int:
    """Print the figures."""
    parser = described(__doc__)
    parser.add_argument("--blocks", type=positive, default=200_000, help="blocks of an engine")
    parser.add_argument("--engines", type=positive, default=8, help="engines that a lookup asks")
    given = parser.parse_args()
    rng = random.Random(0)
    prompts = [_tokens(rng) for _ in range(max(1, given.blocks // _IN_PROMPT))]
    payloads = [_message(tokens, number) for number, tokens in enumerate(prompts)]
    blocks = _IN_PROMPT * len(prompts)
    picture, begun = Picture(1 << 21), time.thread_time()
    for payload in payloads:
        whole(picture.apply(kv_events.decode(payload)))
    print(f"applied: {(time.thread_time() - begun) / blocks * 1e6:.2f} us a block")
    tracemalloc.start()
    traced = Picture(1 << 21)
    for payload in payloads:
        whole(traced.apply(kv_events.decode(payload)))
    print(f"kept: {tracemalloc.get_traced_memory()[0] / blocks:.0f} bytes a block")
    tracemalloc.stop()
    times, steps = list[float](), list[float]()
    for tokens in rng.sample(prompts, min(50, len(prompts))):
        begun, prompt = time.thread_time(), PromptBlocks(tokens, None)
        for _ in range(given.engines):
            looking, last = picture.lookup(prompt), time.thread_time()
            for _ in looking:
                steps.append(time.thread_time() - last)
                last = time.thread_time()
        times.append(time.thread_time() - begun)
    text = (
        f"{statistics.median(times) * 1e3:.2f} ms, in pieces of at most {max(steps) * 1e3:.2f} ms"
    )
    print(f"lookup of {len(prompts[0]):,} tokens at {given.engines} engines: {text}")
    return 0


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(128_000) for _ in range(_BLOCK * _IN_PROMPT)]


def _message(tokens: list[int], number: int) -> bytes:
    """As vLLM publishes a prompt's blocks."""
    hashes: list[kv_events.Hash] = [
        bytes(28) + (number * _IN_PROMPT + one).to_bytes(4, "big") for one in range(_IN_PROMPT)
    ]
    event = kv_events.BlockStored(hashes, None, tokens, _BLOCK, None, "GPU", None)
    return msgspec.msgpack.encode([0.0, [event], 0])


if __name__ == "__main__":
    sys.exit(main())
