"""The connector's scheduler half over a real Store with hand-turned lanes and clock: what of a hit
it takes, and when it gives up waiting."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as Counted

from kvtier.connectors.vllm.groups import Geometry, Group, Kind
from kvtier.connectors.vllm.metadata import StepReport
from kvtier.connectors.vllm.stats import TierMetrics, TierStats
from kvtier.core.chunk import ChunkLayout, fingerprint
from kvtier.core.lookup import NO_LOOKUP
from kvtier.core.pool import Pool
from kvtier.load_policy.decide import LoadPolicy
from kvtier.load_policy.prefill import Prefill, PrefillTime, Work
from kvtier.store.observer import Observer
from kvtier.store.store import Store
from kvtier.testing import DictTier, ManualLane
from tests.clock import Clock
from tests.unit.scheduler_half import scheduler_half
from tests.unit.vllm_request import planned, vllm_request

pytestmark = pytest.mark.vllm

SLOT = 4096
BLOCK, CHUNK = 16, 32
LAYOUT = ChunkLayout(fingerprint({"model": "test"}), CHUNK, BLOCK, (SLOT,))
PER_TOKEN = 1 / 64
"""A chunk of 32 tokens takes half a second to compute."""


class SlowTier(DictTier):
    """Reads take ``seconds`` of the test's clock."""

    def __init__(self, clock, *, shared=False):
        super().__init__(256, shared=shared)
        self.clock, self.seconds, self.reads = clock, 0.0, 0
        self.away = False

    def read(self, key, into):
        self.reads += 1
        self.clock.now += self.seconds
        return None if self.away else super().read(key, into)


class Bench:
    """A scheduler half with its store, and vLLM's calls in short."""

    def __init__(
        self,
        *,
        always=False,
        known=True,
        slots=8,
        ranks=1,
        slowest_s=0.0,
        comes_whole=False,
        **duty,
    ):
        self.clock = Clock(100.0)
        self.tier, self.lane = SlowTier(self.clock), ManualLane()
        self.tier.comes_whole = comes_whole
        self.store = Store(Pool(slots, SLOT), [(self.tier, self.lane)], clock=self.clock)
        self.load_policy = LoadPolicy(
            60.0,
            always=always,
            prefill=Prefill(PrefillTime(PER_TOKEN) if known else None),
            slowest_s=slowest_s,
            clock=self.clock,
        )
        self.half = scheduler_half(
            self.store,
            LAYOUT,
            Geometry((Group(0, Kind.FULL, BLOCK),), CHUNK),
            (((0, True),),) * ranks,
            self.load_policy,
            **duty,
        )

    def hold(self, tokens, read_s, ready=0):
        """The tier holds the prompt's chunks, RAM the first ``ready``. The last read of it took
        ``read_s``."""
        keys = LAYOUT.keys(tokens)
        self.tier.held.update({key: bytes(SLOT) for key in keys})
        probe = LAYOUT.keys([7] * CHUNK)
        self.tier.held[probe[0]] = bytes(SLOT)
        self.store._directory.tiers[0].found([*keys[::-1], *probe])
        self.tier.seconds = read_s
        with self.store.load(probe):
            self.lane.run()
        self.store.load(keys, most=ready).close()
        with self.store.load(keys, most=ready):
            self.lane.run()
        self.tier.reads = 0

    def matched(self, request):
        tokens: int | None
        tokens, waits = self.half.matched(request, 0)
        assert waits is bool(tokens), (
            "vLLM lets a request wait that is promised something, and no other"
        )
        return tokens

    def waits_until_idle(self, request):
        while (tokens := self.matched(request)) is None:
            assert len(self.lane), "it waits for nothing"
            self.lane.turn()
        return tokens

    def granted(self, request, tokens):
        """The request gets its blocks, ``tokens`` of them to be loaded."""
        blocks = SimpleNamespace(
            get_block_ids=lambda: ([*range(1, 1 - (-request.num_tokens // BLOCK))],)
        )
        self.half.allocated(request, blocks, tokens)

    def ended(self, request, tokens):
        """The request gets its blocks, and its load is done. Returns what vLLM's metrics are told
        then."""
        self.granted(request, tokens)
        for number in list(self.half._pending):
            self.half.report(StepReport(done=Counter({number: 1})))
        told: dict[str, int] = self.half.counts()
        return told

    def computed(self, request):
        """The request is computed whole, and its chunks are saved."""
        new = SimpleNamespace(
            req_id=request.request_id, block_ids=([*range(1, 100)],), num_computed_tokens=0
        )
        for job in self.half.step(planned([new], {request.request_id: request.num_tokens})).saves:
            self.half.report(StepReport(done=Counter({job.number: 1})))
        self.lane.run()

    def stepped(self):
        """A step with nothing to compute, as between two rounds of vLLM's questions."""
        self.half.step(planned())

    def served(self, request):
        """A request from its arrival to its end. Returns what vLLM's metrics are told of it."""
        counts = self.ended(request, self.waits_until_idle(request) or 0)
        self.computed(request)
        done(self, request)
        return counts

    def counts(self):
        return {
            name: count for name, count in self.store.stats().items() if name.startswith("declined")
        }


def prompt(chunks, request_id="one", *, salt=None, first=0):
    return vllm_request([first, *range(1, chunks * CHUNK + 1)], request_id, salt)


def done(bench, request):
    """The request ends. Nothing of it is left."""
    bench.half.finished(request)
    bench.lane.run()
    bench.store.check(idle=True)


def test_a_hit_that_is_slower_than_computing_is_declined_at_once_and_leaves_nothing():
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.6)
    assert bench.matched(request) == 0
    assert bench.counts() == {"declined_slower": 6}
    bench.store._directory.check(idle=True)
    assert bench.matched(request) == 0, "vLLM may ask again"
    assert bench.counts() == {"declined_slower": 6}, "and it is counted once"
    assert bench.ended(request, 0) == {"declined_slower": 6}
    done(bench, request)
    assert bench.tier.reads == 1, "one trial read"


@pytest.mark.parametrize("no", [False, 0, None, "false", "true"])
def test_a_request_that_asks_not_to_be_kept_leaves_no_trace_and_is_served_nothing(no):
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    request.kv_transfer_params = {"kvtier.cache": no}
    assert bench.served(request) == {}
    private, held = prompt(6, "private", first=1), set(bench.store.every_key())
    private.kv_transfer_params = {"kvtier.cache": no}
    assert bench.served(private) == {}
    assert set(bench.store.every_key()) == held, "nothing was kept"
    private.kv_transfer_params, private.request_id = {"kvtier.cache": True}, "yes"
    assert bench.served(private) == {"missed_cold": 6}
    assert len(set(bench.store.every_key()) - held) == 6


def test_the_store_is_told_in_tokens_what_came_of_each_request():
    bench, names = Bench(slots=3), ("asked", "ideal", "ram_hit", "slow_hit")

    def told(request):
        before = bench.store.stats()
        bench.served(request)
        after = bench.store.stats()
        return [after.get(n, 0) - before.get(n, 0) for n in (f"{name}_tokens" for name in names)]

    assert told(prompt(3)) == [3 * CHUNK, 0, 0, 0]
    assert told(prompt(3, "again")) == [3 * CHUNK, 3 * CHUNK, 3 * CHUNK, 0]
    assert told(prompt(3, "other", first=1)) == [3 * CHUNK, 0, 0, 0]
    bench.tier.away = True
    assert told(prompt(3, "away")) == [3 * CHUNK, 3 * CHUNK, 0, 0], "it would be there"


def test_the_store_is_told_behind_how_many_tokens_of_the_engines_own_a_hit_lies():
    class Places(Observer):
        def served(self, served):
            told.append((served.begin, served.asked, sum(served.hits.values())))

    bench, told = Bench(), list[tuple[int, int, int]]()
    bench.store.observe(Places())
    bench.served(prompt(6))
    again = prompt(6, "again")
    tokens, _ = bench.half.matched(again, 2 * CHUNK)
    bench.ended(again, tokens)
    assert told == [(0, 6 * CHUNK, 0), (2 * CHUNK, 4 * CHUNK, 4 * CHUNK)]


class Arrivals:
    """Stands for the store's ``wait``: a chunk arrives in each, if one is coming."""

    def __init__(self, bench, monkeypatch):
        self.waits = list[float]()
        self._lane = bench.lane
        monkeypatch.setattr(bench.store, "wait", self._wait)

    def _wait(self, timeout_s):
        self.waits.append(timeout_s)
        if len(self._lane):
            self._lane.turn()


def test_an_engine_without_work_waits_a_moment_for_what_is_coming(monkeypatch):
    bench, short, long = Bench(steps_alone=True), prompt(2, "short"), prompt(6, "long", first=1)
    bench.hold(short.all_token_ids[:-1], read_s=0.1)
    arrivals = Arrivals(bench, monkeypatch)
    assert bench.matched(short) == 2 * CHUNK
    assert 0 < sum(arrivals.waits) <= 0.01
    done(bench, short)

    bench.stepped()
    bench.hold(long.all_token_ids[:-1], read_s=0.1)
    arrivals.waits.clear()
    assert bench.matched(long) is None, "vLLM has other things to do"
    assert 0 < sum(arrivals.waits) <= 0.01
    done(bench, long)


def test_nothing_is_waited_for_while_somebody_else_would_be_delayed(monkeypatch):
    for case in ("others step with it", "it computes", "a worker copies", "another was asked"):
        bench, request = Bench(steps_alone=case != "others step with it"), prompt(2)
        other = prompt(1, "other", first=1)
        bench.hold(other.all_token_ids[:-1], read_s=0.1)
        if case == "a worker copies":
            bench.granted(other, bench.waits_until_idle(other) or 0)
            bench.stepped()
        if case == "it computes":
            bench.computed(other)
        bench.hold(request.all_token_ids[:-1], read_s=0.1)
        arrivals = Arrivals(bench, monkeypatch)
        if case == "another was asked":
            other.skip_reading_prefix_cache = True
            assert bench.matched(other) == 0
        assert bench.matched(request) is None, case
        assert not arrivals.waits, case


def test_what_is_in_ram_is_taken_and_the_slow_rest_left():
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.6, ready=2)
    assert bench.matched(request) == 2 * CHUNK
    assert bench.counts() == {"declined_slower": 4}
    done(bench, request)


def test_a_stalled_tier_costs_one_deadline_and_is_then_left():
    bench = Bench()
    first, second = prompt(6, "first"), prompt(6, "second")
    bench.hold(first.all_token_ids[:-1], read_s=0.1)
    asked_at = bench.clock.now
    assert bench.matched(first) is None
    bench.clock.now = asked_at + 6 * 0.1 * 3 - 0.01
    assert bench.matched(first) is None
    bench.clock.now = asked_at + 6 * 0.1 * 3 + 0.01
    assert bench.matched(first) == 0, "three times what was forecast"
    assert bench.counts() == {"declined_deadline": 6}

    bench.tier.seconds = 30.0
    bench.lane.run()  # only the trial read is still wanted
    assert bench.tier.reads == 1
    assert bench.matched(second) == 0
    assert bench.counts() == {"declined_deadline": 6, "declined_slower": 6}
    bench.half.finished(first)
    done(bench, second)


def test_no_load_is_waited_for_longer_than_computing_takes():
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.3)
    asked_at = bench.clock.now
    assert bench.matched(request) is None
    bench.lane.turn()
    bench.clock.now = asked_at + 6 * CHUNK * PER_TOKEN + 0.01
    assert bench.matched(request) == CHUNK, "what came in time is taken"
    assert bench.counts() == {"declined_deadline": 5}
    done(bench, request)


def test_a_cut_that_the_server_does_not_answer_is_a_miss(monkeypatch):
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    assert bench.matched(request) is None
    bench.lane.turn()
    bench.clock.now += 60
    load = bench.store.load
    monkeypatch.setattr(
        bench.store, "load", lambda keys, start, most, asker: load(keys, start, most=0)
    )
    assert bench.matched(request) == 0, "no slot is promised that is not there"
    done(bench, request)


def test_an_engine_of_unknown_speed_takes_a_hit_and_learns_from_its_steps():
    bench, request = Bench(known=False), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=5.0)
    assert bench.matched(request) is None
    done(bench, request)
    for _ in range(3):
        number = bench.load_policy.planned(Work.of([(1000, 0)]))
        bench.clock.now += 1000 * PER_TOKEN
        bench.load_policy.ended(number, 0, 0.0, 0.0)
    bench.tier.seconds = 0.0
    assert bench.matched(prompt(6, "two")) == 0
    bench.store.check(idle=False)


def test_what_keeps_coming_of_a_load_on_a_guess_is_waited_for_as_long_as_its_bytes_may_take():
    """32 seconds a chunk at the slowest pace, behind a time-out of 60."""
    for read_s, chunks, why in ((40.0, 6, ""), (55.0, 5, "deadline")):
        bench, request = Bench(known=False, slowest_s=1.0), prompt(6)
        bench.hold(request.all_token_ids[:-1], read_s)
        while (tokens := bench.matched(request)) is None:
            bench.lane.turn()
        assert tokens == chunks * CHUNK, read_s
        assert bench.counts() == ({f"declined_{why}": 6 - chunks} if why else {})
        done(bench, request)


def test_what_has_stopped_coming_of_a_load_on_a_guess_is_left_after_one_time_out():
    bench, request = Bench(known=False, slowest_s=1.0), prompt(6)
    bench.hold(request.all_token_ids[:-1], 40.0)
    for _ in range(2):
        assert bench.matched(request) is None
        bench.lane.turn()
    assert bench.matched(request) is None
    bench.clock.now += 61.0
    assert bench.matched(request) == 2 * CHUNK
    assert bench.counts() == {"declined_deadline": 4}
    done(bench, request)


def test_a_load_that_is_cut_at_its_deadline_names_the_tier_that_has_brought_it():
    bench, request = Bench(), prompt(6)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    assert bench.matched(request) is None
    for _ in range(4):
        bench.lane.turn()
    bench.clock.now += 100.0
    assert bench.matched(request) == 4 * CHUNK
    assert bench.ended(request, 4 * CHUNK) == {"loaded_dict": 4, "declined_deadline": 2}
    assert bench.half.sources(request) == {"dict": 4 * CHUNK}
    assert bench.store.stats()["dict_hit_tokens"] == 4 * CHUNK
    done(bench, request)
    bench.stepped()
    again = prompt(6, "again")
    hit = bench.waits_until_idle(again) or 0
    assert bench.ended(again, hit) == {"loaded_ram": 4, "loaded_dict": 2}
    done(bench, again)


def test_a_claim_that_is_taken_anew_because_more_is_known_names_it_too():
    bench, request = Bench(), prompt(6)
    tokens = request.all_token_ids[:-1]
    bench.hold(tokens[: 3 * CHUNK], read_s=0.1)
    assert bench.waits_until_idle(request) == 3 * CHUNK, "and vLLM has no blocks"
    bench.hold(tokens, read_s=0.1)
    bench.stepped()
    assert bench.waits_until_idle(request) == 6 * CHUNK
    assert bench.ended(request, 6 * CHUNK) == {"loaded_dict": 6}
    assert not bench.half._prompts["one"].claim.brought, "a later load may find it in RAM"
    done(bench, request)


def test_a_chunk_that_is_not_there_after_all_is_a_miss_with_the_rest_of_its_run():
    bench, request = Bench(), prompt(4)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    keys = LAYOUT.keys(request.all_token_ids[:-1])
    assert bench.matched(request) is None
    del bench.tier.held[keys[1]]
    assert bench.waits_until_idle(request) == CHUNK
    assert bench.ended(request, CHUNK) == {"loaded_dict": 1, "missed_evicted": 3}
    done(bench, request)


def test_a_chunk_that_ram_has_no_slot_for_is_refused():
    bench, request, other = Bench(slots=4), prompt(4), LAYOUT.keys([9] * CHUNK * 3)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    with bench.store.save(other) as held:
        assert len(held.slots) == 3
        assert bench.waits_until_idle(request) == CHUNK
        assert bench.ended(request, CHUNK) == {"loaded_dict": 1, "declined_refused": 3}
    done(bench, request)


def test_a_step_tells_the_judge_what_it_computes():
    bench, request = Bench(known=False), prompt(40)
    new = SimpleNamespace(req_id="one", block_ids=([*range(80)],), num_computed_tokens=0)
    bench.matched(request)
    for _ in range(2):
        metadata = bench.half.step(planned([new], {"one": 1024}))
        bench.clock.now += 20.0
        bench.half.report(
            StepReport(step=metadata.number, load_s=1.0, loaded_tokens=2 * BLOCK, save_s=3.0)
        )
    hit = prompt(6, "two")
    bench.hold(hit.all_token_ids[:-1], read_s=0.6)
    assert bench.matched(hit) == 0, "1,024 tokens take 16 s: a chunk is computed in half a second"


@pytest.mark.parametrize("shares_blocks", [True, False])
def test_of_equal_prompts_one_loads_and_the_others_wait_for_vllms_own_blocks(shares_blocks):
    bench, one, two = Bench(shares_blocks=shares_blocks), prompt(3), prompt(3, "two")
    bench.hold(one.all_token_ids[:-1], read_s=0.0, ready=3)
    bench.granted(one, bench.waits_until_idle(one) or 0)
    bench.stepped()
    assert bench.matched(two) == (None if shares_blocks else 3 * CHUNK)
    assert bench.half.matched(prompt(4, "behind it"), 3 * CHUNK) == (0, False), (
        "what follows is nobody's load"
    )
    (number,) = bench.half._pending
    bench.half.report(StepReport(done=Counter({number: 1})))
    assert bench.matched(two) == 3 * CHUNK
    bench.half.finished(two)
    done(bench, one)


def test_a_request_whose_load_failed_is_promised_nothing_that_others_have_saved_since():
    bench, request = Bench(), prompt(3)
    bench.hold(request.all_token_ids[:-1], read_s=0.0, ready=3)
    bench.granted(request, bench.waits_until_idle(request) or 0)
    bench.half.report(StepReport(failed=Counter(bench.half._pending.keys())))
    assert bench.served(prompt(3, "other")) == {"loaded_ram": 3, "missed_forgotten": 3}
    assert bench.matched(request) == 0
    assert bench.matched(prompt(3, "again")) == 3 * CHUNK


@pytest.mark.parametrize(("computed", "failed"), [(0, 0), (0, 1), (CHUNK, 0)])
def test_what_the_store_has_given_is_not_offered_to_it_again(monkeypatch, computed, failed):
    bench, offered = Bench(always=True, slots=16), list[int]()
    save = bench.store.save

    def told(keys):
        offered.append(len(keys))
        return save(keys)

    monkeypatch.setattr(bench.store, "save", told)
    tokens = [*range(4 * CHUNK + 5)]
    bench.hold(tokens, 0.0, ready=4)
    request = vllm_request(tokens)
    hit, _ = bench.half.matched(request, computed)
    assert hit == 4 * CHUNK - computed
    bench.granted(request, hit)
    ended = Counter([1])
    bench.half.report(StepReport(failed=ended) if failed else StepReport(done=ended))
    bench.computed(request)
    assert offered == ([4] if computed or failed else [])


@pytest.mark.parametrize(("slots", "most_held", "claimed"), [(10, 10, 3), (24, 12, 6)])
def test_requests_that_wait_claim_half_of_what_the_engine_may_hold_and_the_first_may_always(
    slots, most_held, claimed, monkeypatch
):
    """Of a server's pool others have the rest."""
    bench, prompts = (
        Bench(slots=slots),
        [prompt(3, f"{number}", first=number) for number in range(4)],
    )
    monkeypatch.setattr(Store, "most_held", property(lambda _: most_held))
    for one in prompts:
        keys = bench.half._layout.keys(one.all_token_ids[:-1])
        bench.tier.held.update({key: bytes(SLOT) for key in keys})
        bench.store._directory.tiers[0].found(keys[::-1])
    assert [bench.matched(one) for one in prompts] == [None] * 4
    assert len(bench.lane) == claimed
    bench.stepped()
    assert bench.matched(prompts[3]) is None
    assert len(bench.lane) == claimed + 3, "vLLM asked for it first in this step"
    for one in prompts:
        bench.half.finished(one)
    bench.lane.run()
    bench.store.check(idle=True)


def test_an_engine_whose_workers_cannot_map_the_pool_is_left_alone_with_one_error(caplog):
    bench, request = Bench(), prompt(3)
    bench.hold(request.all_token_ids[:-1], read_s=0.1)
    assert bench.matched(request) is None
    for _ in range(2):
        bench.half.report(StepReport(unmapped="rank 1: cannot map the shared pool"))
    held = set(bench.store.every_key())
    assert bench.matched(request) == 0
    bench.computed(request)
    assert set(bench.store.every_key()) == held
    assert caplog.text.count("kvtier keeps and serves nothing in this engine") == 1
    done(bench, request)


def test_each_reason_of_a_miss_is_told_and_the_whole_run_counts_under_it():
    bench = Bench(slots=4)
    assert bench.served(prompt(3)) == {"missed_cold": 3}
    assert bench.served(prompt(3, "again")) == {"loaded_ram": 3}
    assert bench.served(prompt(3, "tenant", salt="tenant")) == {"missed_salt": 3}
    assert bench.served(prompt(4, "longer", salt="tenant")) == {"loaded_ram": 3, "missed_cold": 1}
    bench.store.invalidate(LAYOUT.keys(prompt(3).all_token_ids[:-1]))
    assert bench.served(prompt(3, "cleared")) == {"missed_forgotten": 3}


def test_another_salt_is_told_from_a_new_prompt_if_an_earlier_start_has_saved_the_tokens():
    bench, request = Bench(always=True), prompt(3)
    bench.hold(request.all_token_ids, 0.0, ready=3)
    bench.served(request)
    assert bench.served(prompt(3, "two", salt="other"))["missed_salt"] == 3


def test_what_left_for_room_is_evicted_not_cold():
    bench = Bench(slots=4)
    without = Bench(slots=4)
    store = without.store = without.half.store = Store(Pool(4, SLOT))
    without.half._claims._store = without.half._saves._store = store
    for one in (bench, without):
        one.served(prompt(4))
        one.served(prompt(4, "other", first=7))
    assert bench.served(prompt(4, "again")) == {"loaded_dict": 4}
    assert without.served(prompt(4, "again")) == {"missed_evicted": 4}


def test_a_request_that_is_being_computed_by_another_is_not_called_new():
    bench, one, two = Bench(), prompt(3), prompt(3, "two")
    with bench.store.save(LAYOUT.keys(one.all_token_ids[:-1])):
        assert bench.matched(two) == 0
        assert bench.ended(two, 0) == {"missed_saving": 3}
    done(bench, two)


def test_a_server_that_does_not_answer_is_a_tier_that_is_down(monkeypatch):
    bench, request = Bench(), prompt(3)
    monkeypatch.setattr(bench.store, "load_unknown", lambda *told, **more: None)
    monkeypatch.setattr(bench.store, "lookup", lambda keys: NO_LOOKUP)
    assert bench.matched(request) == 0
    assert bench.ended(request, 0) == {"missed_tier_down": 3}
    done(bench, request)


def test_a_model_that_others_cut_into_another_size_is_warned_of_once(monkeypatch, caplog):
    bench = Bench()
    nothing = NO_LOOKUP._replace(why="other_chunk_size")
    monkeypatch.setattr(bench.store, "load_unknown", lambda *told, **more: None)
    monkeypatch.setattr(bench.store, "lookup", lambda keys: nothing)
    for name in ("one", "two"):
        request = prompt(3, name)
        assert bench.matched(request) == 0
        assert bench.ended(request, 0) == {"missed_other_chunk_size": 3}
        done(bench, request)
    (said,) = [one for one in caplog.records if "other chunk size" in one.message]
    assert said.levelname == "WARNING" and f"have {CHUNK} tokens" in said.message


def test_the_last_block_of_a_prompt_is_always_computed_and_no_miss():
    bench, request = Bench(), prompt(3)
    request.num_tokens = len(request.all_token_ids) - 1
    assert bench.served(request) == {"missed_cold": 3}
    again = prompt(3, "again")
    again.num_tokens = len(again.all_token_ids) - 1
    assert bench.waits_until_idle(again) == 3 * CHUNK - BLOCK
    assert bench.ended(again, 3 * CHUNK - BLOCK) == {"loaded_ram": 3}
    done(bench, again)


def test_a_block_that_can_never_be_loaded_is_no_miss():
    bench, request = Bench(), prompt(1)
    bench.half._layout = ChunkLayout(LAYOUT.fingerprint, BLOCK, BLOCK, (SLOT,))
    request.num_tokens = CHUNK
    assert bench.matched(request) == 0
    assert bench.ended(request, 0) == {"missed_cold": 1}, (
        "of two, the last is computed whatever is held"
    )
    done(bench, request)


def test_a_tier_that_stops_answering_on_the_way_is_down_and_has_refused_nothing():
    bench, request = Bench(), prompt(4)
    bench.hold(request.all_token_ids[:-1], read_s=0.1, ready=1)
    bench.tier.away = True
    assert bench.waits_until_idle(request) == CHUNK
    assert bench.ended(request, CHUNK) == {"loaded_ram": 1, "missed_tier_down": 3}
    done(bench, request)


def test_an_engine_whose_own_cache_serves_the_beginnings_is_not_warned(caplog):
    bench = Bench(slots=16)
    bench.served(prompt(1))
    for number in range(240):
        request = prompt(11, str(number), first=number)
        assert bench.half.matched(request, CHUNK) == (0, False)
        assert bench.ended(request, 0) == {"missed_cold": 10}
        bench.half.finished(request)
        bench.clock.now += 5.0
    assert "were hits" not in caplog.text


def test_an_engine_that_never_hits_warns_once_and_tells_vllm(caplog):
    bench = Bench(slots=16)
    told = Counter[str]()
    for number in range(240):
        told.update(bench.served(prompt(10, str(number), salt=str(number))))
        bench.clock.now += 5.0
    assert told == {"missed_cold": 10, "missed_salt": 2390, "zero_hits": 1}
    (warning,) = [
        record.getMessage() for record in caplog.records if "were hits" in record.getMessage()
    ]
    assert warning.startswith("0 of 2,000 chunks asked for were hits in 17 min: 100% salt: ")
    assert "cache_salt" in warning
    assert bench.served(prompt(10, "again", salt="239"))["zero_hits"] == 0, "a hit ends it"


def test_prompts_shorter_than_a_chunk_are_told_of(caplog):
    bench = Bench()
    for number in range(2000):
        request = prompt(1, str(number))
        request.num_tokens = CHUNK - 1
        assert bench.matched(request) == 0
        bench.ended(request, 0)
        bench.half.finished(request)
        bench.clock.now += 1.0
    assert "prompts have fewer tokens than one chunk" in caplog.text


def test_vllm_shows_misses_by_reason_and_that_nothing_is_ever_hit():
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counted, Gauge, Histogram)}
    shown = TierMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    first = TierStats(data={"missed_salt": 2, "zero_hits": 0}).aggregate(
        TierStats(data={"missed_salt": 1})
    )
    assert first.reduce() == {"missed_salt": 3, "zero_hits": 0}
    told = first.aggregate(TierStats(data={"zero_hits": 1}))
    shown.observe(told.to_dict())

    def value(name, **labels):
        return registry.get_sample_value(f"vllm:kvtier_{name}", {"engine": "0"} | labels)

    assert value("missed_chunks_total", reason="salt") == 3
    assert value("zero_hits") == 1
    shown.observe({"zero_hits": 0})
    assert value("zero_hits") == 0
