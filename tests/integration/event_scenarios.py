"""Engines whose KV event stream is followed by vLLM's own format: run as
:mod:`tests.integration.scenarios` is.

A subscriber builds a picture of what every medium holds, as a router does. The scenario tells it
beside what the store itself holds.
"""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.core.errors import StateError
from kvtier.extensions.event_stream.engine import Announcer
from tests.integration.scenarios import BLOCK, CHUNK, Engine, answered, document
from tests.unit.scheduler_half import extension

PROMPTS = 5
_SECONDS = 120.0


class Picture:
    def __init__(self, endpoint):
        import zmq
        from msgspec.msgpack import Decoder
        from vllm.distributed.kv_events import KVEventBatch

        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._decoder = Decoder(type=KVEventBatch)
        self.held: dict[tuple[str, str | None], set[bytes]] = {}
        self.tokens: dict[tuple[str, bytes], tuple[Any, ...]] = {}
        self.stored_twice = self.removed_unknown = 0

    def hear(self, until, step):
        """Take what comes until it is as it should be."""
        end = time.monotonic() + _SECONDS
        while not until():
            step()
            if self._socket.poll(20):
                _, _, payload = self._socket.recv_multipart()
                for event in self._decoder.decode(payload).events:
                    self._apply(event)
            elif time.monotonic() > end:
                return False
        return True

    def _apply(self, event):
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.held.pop(("GPU", None), None)
            return
        place = event.medium, getattr(event, "ownership", None)
        held, hashes = self.held.setdefault(place, set()), set(event.block_hashes)
        if kind == "BlockRemoved":
            self.removed_unknown += event.medium != "GPU" and not hashes <= held
            held -= hashes
            return
        self.stored_twice += event.medium != "GPU" and bool(hashes & held)
        held |= hashes
        size, parent = event.block_size, event.parent_block_hash
        for number, one in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            self.tokens[event.medium, one] = (tuple(tokens), parent)
            parent = one


class Followed:
    """An engine in one process, with its store and a subscriber."""

    def __init__(self, model):
        own = f"ipc://{Path(os.environ['TEST_FOLDER']) / f'events{os.getpid()}'}"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": own}
        self.engine = Engine(model, kv_events_config=events)
        self.core = self.engine.llm.llm_engine.engine_core.engine_core
        self.half = self.core.scheduler.connector._scheduler
        self.store = self.half.store
        self.watched = extension(self.half, Announcer)._store
        self.picture = Picture(own)
        seed = iter(range(900, 1000))

        def step():
            """A request more, until the subscriber is known to the publisher."""
            self.engine.ask([document(next(seed), BLOCK - 2)], max_tokens=4)

        assert self.picture.hear(lambda: bool(self.picture.held), step), "no event has come"

    def chunks(self, seed, tokens=16 * BLOCK + 1):
        """The store's keys of a prompt: taken from the prompt while it is asked."""
        seen: list[list[bytes]] = []
        keys = self.half._keys

        def noted(prompt, tokens):
            found = keys(prompt, tokens)
            seen.append(list(found))
            return found

        self.half._keys = noted
        self.engine.ask([document(seed, tokens)], max_tokens=1)
        self.half._keys = keys
        return max(seen, key=len)

    def truth(self, keys):
        """Blocks of these chunks by place, as the store says, one by one."""
        names = self.watched.place_names
        found = dict.fromkeys(names, 0)
        for places in (self.watched.places([key])[0] for key in keys):
            for place in places:
                found[names[place]] += CHUNK // BLOCK
        return found

    def seen(self):
        """Blocks by place, as the subscriber sees them."""
        places = {("CPU", None): "ram", ("STORAGE", None): "nvme"}
        return {name: len(self.picture.held.get(place, ())) for place, name in places.items()}

    def settle(self, keys):
        """Let the engine take idle steps until the subscriber sees what the store holds."""

        def step():
            if self.core.scheduler.has_requests():
                self.core.step()

        def is_at_rest():
            try:
                self.store.check(idle=True)
            except StateError:
                return False
            lanes = getattr(self.store, "lanes", ())  # a server's check tells of its own
            return not any(sum(lane.queued) for lane in lanes)

        self.picture.hear(is_at_rest, step)
        agree = self.picture.hear(lambda: self.seen() == self.truth(keys), step)
        return {"agree": agree, "seen": self.seen(), "truth": self.truth(keys)}


def followed(model):
    """More prompts than RAM holds, a clear, and what a prompt that only NVMe has makes known."""
    one = Followed(model)
    keys: list[bytes] = []
    told: dict[str, Any] = {}
    for seed in range(PROMPTS):
        keys += one.chunks(seed)
        told["saved"] = one.settle(keys)
    picture = one.picture
    told["as vLLM says"] = all(
        picture.tokens.get(("GPU", block)) == said
        for (medium, block), said in picture.tokens.items()
        if medium != "GPU"
    )
    told["described"] = sum(medium != "GPU" for medium, _ in picture.tokens)
    for seed in range(100, 106):
        keys += one.chunks(seed)
    one.engine.ask([document(0)], max_tokens=1)
    told["after promotion"] = one.settle(keys)
    told["odd"] = [picture.stored_twice, picture.removed_unknown]
    return told


def restarted(model):
    """The first prompt after a start over a disk that has it, and then a clear."""
    one = Followed(model)
    told: dict[str, Any] = {"before": one.seen()}
    keys = one.chunks(0)
    told["named"] = one.settle(keys)
    one.core.reset_prefix_cache(reset_connector=True)
    told["cleared"] = one.settle(keys)
    return told


main = partial(answered, globals())
if __name__ == "__main__":
    main()
