"""What a scheduler's half tells an Announcer of its prompts' chunks, without an engine."""

from typing import Any

from kvtier.connectors.vllm.groups import Geometry, Group, Kind
from kvtier.connectors.vllm.scheduler_side.jobs import Pending
from kvtier.connectors.vllm.scheduler_side.prompts import Prompt
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.extensions.event_stream.engine import Announcer, EventGroup

BLOCK, CHUNK = 16, 32
GEOMETRY = Geometry((Group(0, Kind.FULL, BLOCK),), CHUNK)


def layout(slot_bytes):
    return ChunkLayout(fingerprint({"model": "stream"}), CHUNK, BLOCK, (slot_bytes // 2,))


class Asked:
    """What events need of vLLM's request. Each ``engine`` has hashes of its own."""

    lora_request = cache_salt = prompt_embeds = session_id = None
    mm_features: tuple[Any, ...] = ()

    def __init__(self, prompt, chunks, engine=0):
        self.all_token_ids = [1000 + prompt, *range(1, chunks * CHUNK)]
        count = chunks * CHUNK // BLOCK
        self.block_hashes = [bytes([engine, prompt, number, 0] * 8) for number in range(count)]
        self.keys = layout(8192).keys(self.all_token_ids)


class Announcing:
    """An engine's store, and what it announces of its chunks."""

    def __init__(self, store):
        self.store, self.watched = store, store.watch()
        groups = {0: EventGroup(BLOCK, BLOCK, "full_attention")}
        self.announcer = Announcer(self.watched, GEOMETRY, groups)

    def save(self, request, *, fails=False):
        pieces = dict(zip(request.keys, GEOMETRY.trunk(0, len(request.keys)), strict=True))
        with self.store.save(request.keys) as lease:
            told = {key: pieces[key] for key in lease.keys}
            self.announcer.saving(Prompt(request, None), 0, 1, told)
            if fails:
                failed = Pending(1, ["one"], lease.keys, save=lease, failed=1)
                self.announcer.ended(failed, last_of=["one"])
            else:
                lease.commit()

    def name(self, request):
        self.announcer.asked(Prompt(request, None), request.keys)
