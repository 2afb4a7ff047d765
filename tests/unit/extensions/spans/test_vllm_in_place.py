"""The worker's half of tokens that are computed in place: when vLLM is told, and which passes are
not believed."""

from types import SimpleNamespace

import pytest
import torch

from kvtier.connectors.vllm.groups import InPlaceRun, SpanMove
from kvtier.connectors.vllm.metadata import (
    PoolAddress,
    SpanJob,
    SpanPass,
    StepMetadata,
)
from kvtier.connectors.vllm.worker_side.worker import GroupLayers, WorkerHalf
from kvtier.core.errors import KVTierError, LayoutError
from kvtier.core.pool import Pool
from kvtier.extensions.spans import in_place
from kvtier.extensions.spans.in_place import InPlace
from kvtier.extensions.spans.mover import Mover
from tests.unit.extensions.spans.test_vllm_moved import (
    BLOCKS,
    CHUNK,
    HOME,
    LAYERS,
    SIZE,
    TOKENS,
    TWINS,
    Kernel,
    Worker,
)
from tests.unit.still_model import StillModel

pytestmark = pytest.mark.vllm

PAGE = 4096
TABLE = [7, 2, 5, 8, 1]
TABLES = {1: TABLE, 2: [9, 6, 4, 3, 0]}
DISTANCE = 8
PIECES = [SpanMove(0, 0, 8, DISTANCE, DISTANCE)]
RUN = (DISTANCE, DISTANCE, HOME[:3])


def copying(number=1, *, goes_on=True):
    return SpanJob(number, None, PIECES, TABLES[number], f"r{number}", 8, TWINS, goes_on)  # type: ignore[arg-type]


def ordered(number=1, runs=(RUN,)):
    return SpanPass(
        number,
        f"r{number}",
        TABLES[number],
        [InPlaceRun(begin, moved, begin + len(tokens), tokens) for begin, moved, tokens in runs],
    )


class Model:
    """A pass that computes keys and values of the first layer right. In the others it leaves a
    sign. ``off``: positions by which it is wrong. ``idle``: it writes nothing."""

    def __init__(self, off=0, *, idle=False):
        self.off, self.idle, self.passes = off, idle, 0
        self.said = list[bool]()
        self.others = True
        self.worker = Worker(HOME, compute=self, agree=self.agree)

    def agree(self, ready):
        """``others``: what the other ranks say."""
        self.said.append(ready)
        return ready and self.others

    def __call__(self, runs, block_ids):
        self.passes += 1
        for run in () if self.idle else runs:
            for at, token in enumerate(run.tokens, run.begin):
                place = block_ids[at // TOKENS] * TOKENS + at % TOKENS
                key = self.worker.key(0, token, at + self.off)[None]
                value = self.worker.values[0, token][None]
                caches = list(self.worker.caches.values())
                Kernel().do_kv_cache_update(None, key, value, caches[0], place[None])
                for cache in caches[1:]:
                    ones = torch.ones_like(key)
                    Kernel().do_kv_cache_update(None, ones, ones, cache, place[None])


def test_a_pass_writes_over_what_was_moved_and_over_nothing_else():
    model = Model()
    model.worker.mover.begin(copying())
    ((_, failed),) = model.worker.go_on()
    assert not failed
    model.worker.mover.compute(ordered())
    for at, token in enumerate(HOME):
        place = DISTANCE + at
        block = TABLE[place // TOKENS]
        key, value = model.worker.read(0, block, place % TOKENS)
        assert torch.allclose(key, model.worker.key(0, token, place), atol=1e-5)
        assert torch.equal(value, model.worker.values[0, token])
        deeper, _ = model.worker.read(1, block, place % TOKENS)
        assert bool((deeper == 1).all()) == (at < len(RUN[2]))


@pytest.mark.parametrize(
    ("model", "run"),
    [
        ({"off": 1}, RUN),
        ({"idle": True}, RUN),
        ({}, (DISTANCE, DISTANCE, [31, 30])),
        ({"off": 1}, (DISTANCE - 1, DISTANCE, [20, HOME[0]])),
    ],
    ids=["position", "nothing", "other tokens", "a hole, as the token behind it shows"],
)
def test_a_pass_that_is_not_right_in_the_first_layer_fails(model, run):
    model = Model(**model)
    model.worker.mover.begin(copying())
    model.worker.go_on()
    with pytest.raises(LayoutError, match="differs in the first layer"):
        model.worker.mover.compute(ordered(runs=(run,)))


def test_what_was_not_copied_is_not_computed():
    model = Model()
    mover = model.worker.mover
    with pytest.raises(KVTierError):
        mover.compute(ordered())
    mover.begin(copying())
    model.worker.go_on()
    mover.give_up()
    with pytest.raises(KVTierError):
        mover.compute(ordered())
    mover.begin(copying())
    model.worker.go_on()
    with pytest.raises(KVTierError):
        mover.compute(ordered(runs=()))
    assert not model.passes


class Rank:
    """A worker half whose pool has a home in its slot 0."""

    def __init__(self):
        self.model, self.weights = Model(), StillModel()
        slot = self.model.worker.slot
        size = -(-slot.numel() // PAGE) * PAGE
        self.pool = Pool(1, size)
        self.pool.view(0)[: slot.numel()] = slot.numpy().tobytes()
        self.address = PoolAddress(self.pool.path, None, 1, size, (((0, True),),))
        worker = self.model.worker
        groups = [GroupLayers(frozenset(worker.caches), CHUNK // TOKENS, BLOCKS)]
        self.half = WorkerHalf(0, groups, worker.caches, self.weights, [worker.mover])
        self.half._clock = lambda: 0.0  # moves everything in one step

    def step(self, *, spans=(), passes=()):
        for job in spans:
            job.pool = self.address
        metadata = StepMetadata(self.address, spans=list(spans), passes=list(passes))
        self.half.begin(metadata)
        self.half.load(metadata)
        self.half.save(metadata)
        self.ended, self.failed = self.half.transfers()
        return self.half.ends.take_report()


@pytest.fixture
def rank():
    return Rank()


def test_vllm_is_told_of_a_load_when_its_pass_is_through(rank):
    report = rank.step(spans=[copying()])
    assert report.done == {1: 1}
    assert not rank.ended
    report = rank.step(passes=[ordered()])
    assert (report.done, report.failed) == ({1: 1}, {})
    assert (rank.ended, rank.failed) == ({"r1"}, set())
    assert rank.model.passes == 1


def test_a_job_without_a_pass_ends_with_its_copies(rank):
    rank.step(spans=[copying(goes_on=False)])
    assert (rank.ended, rank.failed) == ({"r1"}, set())


def test_a_pass_that_fails_fails_its_load_alone(rank):
    rank.step(spans=[copying(1), copying(2)])
    report = rank.step(passes=[ordered(1, ((DISTANCE, DISTANCE, [31]),)), ordered(2)])
    assert (report.done, report.failed) == ({2: 1}, {1: 1})
    assert (rank.ended, rank.failed) == ({"r1", "r2"}, {"r1"})


def test_weights_that_were_replaced_between_the_halves_fail_the_load(rank):
    rank.step(spans=[copying()])
    rank.weights.other = True
    report = rank.step(passes=[ordered()])
    assert report.failed == {1: 1}
    assert (rank.ended, rank.failed) == ({"r1"}, {"r1"})
    assert not rank.model.passes
    assert rank.model.said == [False], "or the other ranks would wait for it"


def test_no_rank_begins_a_pass_before_all_are_ready(rank):
    """One of two jobs was copied here and not on another rank, the other one was not copied
    here."""
    rank.step(spans=[copying(1)])
    rank.model.others = False
    report = rank.step(passes=[ordered(1), ordered(2)])
    assert report.failed == {1: 1, 2: 1}
    assert rank.model.said == [True, False]
    assert not rank.model.passes


def test_a_hole_is_computed_with_the_token_behind_it():
    """What lay in the hole's blocks before does not matter."""
    model = Model()
    model.worker.mover.begin(copying())
    model.worker.go_on()
    model.worker.mover.compute(ordered(runs=((DISTANCE - 3, DISTANCE, [20, 21, 22, HOME[0]]),)))
    for at, token in enumerate([20, 21, 22, *HOME], DISTANCE - 3):
        key, value = model.worker.read(0, TABLE[at // TOKENS], at % TOKENS)
        assert torch.allclose(key, model.worker.key(0, token, at), atol=1e-5)
        assert torch.equal(value, model.worker.values[0, token])


def test_a_rank_that_cannot_copy_tells_vllm_together_with_the_others(rank):
    job = copying()
    job.twins = []
    report = rank.step(spans=[job])
    assert report.failed == {1: 1}
    assert not rank.ended
    rank.step(passes=[ordered(runs=())])
    assert (rank.ended, rank.failed) == ({"r1"}, {"r1"})


@pytest.mark.parametrize(
    ("lora", "replicas", "told"), [(object(), 1, "LoRA"), (None, 2, "data parallelism")]
)
def test_engines_that_compute_nothing_in_place_say_why(lora, replicas, told):
    config = SimpleNamespace(
        lora_config=lora, parallel_config=SimpleNamespace(data_parallel_size=replicas)
    )
    with pytest.raises(LayoutError, match=told):
        InPlace(config, {}, TOKENS)


def test_nothing_is_computed_in_place_beside_other_connectors(monkeypatch):
    """vLLM tells its connector of each layer that is run, and a group tells all that are in it."""
    parallel = SimpleNamespace(data_parallel_size=1)
    config = SimpleNamespace(lora_config=None, parallel_config=parallel)
    monkeypatch.setattr(in_place, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(in_place, "get_kv_transfer_group", lambda: Worker(HOME))
    with pytest.raises(LayoutError, match="another connector"):
        in_place.InPlace(config, {}, TOKENS)


def test_a_model_that_no_pass_can_be_run_with_moves_all_the_same():
    def cannot():
        raise LayoutError("LoRA is on")

    worker = Worker(HOME)
    layers = {f"{index}": layer for index, layer in enumerate(worker.model.layers)}
    caches = {name: torch.zeros(BLOCKS, 2 * SIZE) for name in layers}
    mover = Mover(layers, caches, TOKENS, 256, cannot)
    assert len(layers) == LAYERS
    assert mover.why_not_in_place == "LoRA is on"
