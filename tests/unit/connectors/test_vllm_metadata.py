"""Messages between the halves, as vLLM pickles them."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest

from kvtier.connectors.vllm.metadata import (
    HostPools,
    Job,
    LoadEnd,
    Move,
    PoolAddress,
    StepMetadata,
    StepReport,
)

pytestmark = pytest.mark.vllm


def messages():
    pool = PoolAddress("/dev/shm/kvtier-12345-0", None, 4096, 1 << 20, (((0, True),),), inode=7)
    jobs = [Job(number, pool, [Move(0, [9], [*range(300, 316)])]) for number in (70, 71)]
    quiet = StepMetadata(pool, number=3000, computes=True, may_reuse=False)
    end = LoadEnd(70, "one", [3, 4], 1)
    return [
        quiet,
        replace(quiet, saves=jobs[:1]),
        replace(quiet, loads=[replace(jobs[0], request_id="one", tokens=256)], ends=[end]),
        replace(quiet, replacements_seen=Counter({1: 1}), renewed={pool: [4]}, asks_layout=True),
        StepMetadata(HostPools("", None, 8, 4096, (), hosts=(pool, pool)), may_reuse=True),
        StepReport(3000, 256.0, 0.5, done=Counter({70: 2}), replacements=Counter({0: 1})),
        StepReport(),
    ]


def test_messages_arrive_as_they_were_sent():
    for message in messages():
        sent = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        assert pickle.loads(sent) == message  # noqa: S301 - our own


def test_a_decode_steps_message_is_short():
    quiet, saving, *_ = messages()
    assert len(pickle.dumps(quiet, pickle.HIGHEST_PROTOCOL)) < 200
    assert len(pickle.dumps(saving, pickle.HIGHEST_PROTOCOL)) < 300
