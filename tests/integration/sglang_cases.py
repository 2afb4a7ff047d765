"""What test_sglang.py runs in SGLang's environment: the plug-in under SGLang's real controllers,
beside its HiCacheFile."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as rules
from hypothesis import strategies as some
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.runtime_context import get_context, get_serving

from kvtier.bench.processes.servers import free_port
from kvtier.core.chunk import ChunkLayout
from kvtier.core.errors import ConfigError
from kvtier.extensions.sglang import hicache
from tests.certificates import make_certificates
from tests.child_process import wait_for
from tests.integration import sglang_cpu as cpu
from tests.nvme_place import flip
from tests.server_process import ServerProcess, attached, run, serving, short_folder

MODELS = Path(os.environ["SGLANG_CASES_MODELS"])
SLACK_S = 3.0
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
FEW_SLOTS = 24
PAGE_BYTES = 2 * cpu.LAYERS * cpu.PAGE * cpu.HEADS * cpu.DIM * 2
_TOKENS = iter(range(1, 1 << 30))


@pytest.fixture(scope="module", autouse=True)
def published():
    return cpu.publish(MODELS / "a")


@pytest.fixture(autouse=True)
def patient(request, monkeypatch):
    """Most ask what is served, and not how fast this host is."""
    if "fault" not in request.fixturenames:
        for name in ("_SCHEDULER_S", "_FIND_S", "_BATCH_S", "_ANSWER_MS"):
            monkeypatch.setattr(hicache, name, 60_000)


@pytest.fixture(scope="module")
def server():
    with serving(ram_bytes=256 << 20) as one:
        yield one


@contextlib.contextmanager
def told(**arguments):
    """With other server arguments."""
    one = cpu.publish(arguments.pop("model_path", MODELS / "a"), **arguments)
    try:
        yield
    finally:
        one.restore()


def settings(server, **more):
    return cpu.PLUGIN | {"server": f"unix://{server.socket}"} | more


@contextlib.contextmanager
def detaching(one):
    try:
        yield one
    finally:
        one.detach_storage_backend()


def running(pool, server, *, extra=None, **more):
    """A controller over one pool, or over several by name."""
    make = cpu.hybrid if isinstance(pool, dict) else cpu.controller
    return detaching(make(pool, "dynamic", settings(server, **(extra or {})), **more))


def filing(pool, folder, **more):
    return detaching(cpu.controller(pool, "file", {"file_storage_path": str(folder)}, **more))


def prompt(pages, page=cpu.PAGE):
    """A prompt that no other begins as."""
    return [next(_TOKENS), *range(pages * page - 1)]


def saved(pool, server, pages=8, **more):
    tokens = prompt(pages, pool.page_size)
    with running(pool, server, **more) as one:
        indices = pool.alloc(len(tokens))
        assert cpu.backup(one, tokens, indices) == pages
        assert cpu.prefetch(one, tokens)[:2] == (pages, pages), "the very same engine"
        pool.clear()
    return tokens


def hits(pool, server, tokens, **more):
    with running(pool, server, **more) as one:
        found, read, _ = cpu.prefetch(one, tokens)
        assert found == read
        pool.clear()
        return found


def test_all_arguments_that_do_not_decide_are_sglangs():
    from sglang.srt.server_args import ServerArgs  # after torchvision's stand-in

    from kvtier.extensions.sglang.engine_identity import DOES_NOT

    assert set(ServerArgs.__struct_fields__) >= DOES_NOT


# ---- beside HiCacheFile --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"), [("mha", one) for one in LAYOUTS] + [("mla", one) for one in LAYOUTS[:3]]
)
def test_the_same_hits_and_the_same_bytes_as_files(server, tmp_path, kind, layout):
    """150 operations on prompts that share beginnings; 1,050 with all parameters."""
    pool = getattr(cpu, kind)(layout, pages=40)
    choose, replicated = random.Random(layout + kind), kind == "mla"
    written: dict[str, Any] = {}
    families = [prompt(8) for _ in range(3)]
    with (
        running(pool, server, replicated=replicated, extra={"interface_v1": 0}) as ours,
        filing(pool, tmp_path, replicated=replicated) as file,
    ):
        for number in range(150):
            family = choose.choice(families)
            tokens = family[: choose.randint(1, 8) * cpu.PAGE]
            if choose.random() < 0.3:
                tokens = tokens[: len(tokens) // 2] + [number] * (len(tokens) - len(tokens) // 2)
            names = cpu.hashes_of(tokens)
            if choose.random() < 0.4:
                indices = pool.alloc(len(tokens))
                for at, name in enumerate(names):
                    page = pool.get_dummy_flat_data_page().view(torch.int16)
                    page = torch.randint_like(page, -30000, 30000).view(pool.dtype)
                    written.setdefault(name, page)
                    pool.set_from_flat_data_page(int(indices[at * cpu.PAGE]), written[name])
                assert cpu.backup(ours, tokens, indices) == len(names)
                assert cpu.backup(file, tokens, indices) == len(names)
                pool.free(indices)
                continue
            found, read, indices = cpu.prefetch(ours, tokens)
            oracle = cpu.prefetch(file, tokens)
            assert (found, read) == oracle[:2]
            for at in range(read):
                page = pool.get_data_page(int(indices[at * cpu.PAGE])).view(torch.int16)
                assert torch.equal(page, written[names[at]].view(torch.int16).view_as(page))
            pool.clear()


def test_files_serve_a_permuted_k_and_kvtier_a_miss(server, tmp_path):
    """Equal names and sizes, another order of bytes."""
    one, other = cpu.mha("page_first"), cpu.mha("page_first_direct")
    cpu.scramble(one)
    tokens = prompt(4)
    with filing(one, tmp_path) as writer, filing(other, tmp_path) as reader:
        begin = one.alloc(len(tokens))
        cpu.backup(writer, tokens, begin)
        found, _, indices = cpu.prefetch(reader, tokens)
        k = one.k_buffer[int(begin[0]) : int(begin[0]) + cpu.PAGE].transpose(0, 1).contiguous()
        wrong = other.k_buffer[int(indices[0]) // cpu.PAGE]
        assert found == 4 and not torch.equal(k.view(torch.int16), wrong.view(torch.int16))
    one.clear()
    assert hits(cpu.mha("page_first_direct"), server, saved(one, server, 4)) == 0


def test_files_never_cache_again_after_another_layer_count_and_kvtier_does(server, tmp_path):
    one, other = cpu.mha("page_first"), cpu.mha("page_first", layers=cpu.LAYERS + 1)
    tokens = prompt(4)
    with filing(one, tmp_path) as writer, filing(other, tmp_path) as reader:
        cpu.backup(writer, tokens, one.alloc(len(tokens)))
        assert cpu.prefetch(reader, tokens)[:2] == (4, 0)
    one.clear()
    tokens = saved(one, server, 4)
    assert hits(other, server, tokens) == 0
    with running(other, server) as reader:
        assert cpu.backup(reader, tokens, other.alloc(len(tokens))) == 4
        assert cpu.prefetch(reader, tokens)[:2] == (4, 4)


def test_pages_are_those_of_a_dict(server):
    """Pages in any order, with holes: a load is the run up to the first one that is not held."""
    pool = cpu.mha("page_first", pages=8)
    cpu.scramble(pool)
    content, what = pool.kv_buffer.clone(), some.sampled_from(["set", "get", "exists"])
    with running(pool, server) as one:
        storage = one.storage_backend

        @rules(max_examples=60, deadline=None, database=None)
        @given(some.lists(some.tuples(what, some.sets(some.integers(0, 7), min_size=1))))
        def check(calls):
            names, held = cpu.hashes_of(prompt(8)), dict[int, Any]()
            for call, chosen in calls:
                pages, pool.kv_buffer[:] = list(chosen), content
                rows = torch.cat([torch.arange(at * cpu.PAGE, (at + 1) * cpu.PAGE) for at in pages])
                keys = [names[at] for at in pages]
                done = [all(at in held for at in pages[: end + 1]) for end in range(len(pages))]
                if call == "set":
                    assert all(storage.batch_set_v1(keys, rows))
                    held |= {at: pool.get_data_page(at * cpu.PAGE).clone() for at in pages}
                elif call == "exists":
                    assert storage.batch_exists(keys) == sum(done)
                else:
                    pool.kv_buffer.zero_()
                    assert storage.batch_get_v1(keys, rows) == done
                    for at, is_read in zip(pages, done, strict=True):
                        page, zeros = pool.get_data_page(at * cpu.PAGE), content.new_zeros(())
                        kept = held[at] if is_read else zeros.expand_as(page)
                        assert torch.equal(page.view(torch.int16), kept.view(torch.int16))

        check()


# ---- who shares ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"pool": {"layout": "page_first_direct"}},
        {"pool": {"dtype": torch.float16}},
        {"pool": {"page": 32}},
        {"pool": {"layers": 3}},
        {"more": {"tp": (1, 2)}},
        {"told": {"model_path": MODELS / "b"}},
        {"told": {"weight_version": "2"}},
        {"told": {"kv_cache_dtype": "fp8_e5m2"}},
        {"told": {"attention_backend": "triton"}},
        {"told": {"json_model_override_args": '{"rope_theta": 1}'}},
        {"told": {"lora_paths": [f"x={MODELS / 'b'}"]}},
        {"told": {"load_format": "dummy"}},
        {"extra": {"namespace": "other"}},
    ],
    ids=lambda one: next(f"{key}" for inner in one.values() for key in inner),
)
def test_what_decides_bytes_is_a_miss(server, change):
    tokens = saved(cpu.mha("page_first"), server, 4)
    shape = {"layout": "page_first"} | change.get("pool", {})
    with told(**change.get("told", {})):
        pool, more = cpu.mha(**shape), change.get("more", {})
        assert hits(pool, server, tokens, extra=change.get("extra"), **more) == 0
    with told(served_model_name="m2", port=9, max_running_requests=3):
        assert hits(cpu.mha("page_first", pages=12), server, tokens, model="m2") == 4, "else a hit"
        with running(cpu.mha("page_first"), server) as one:  # salt and adapter begin the hashes
            assert one.storage_backend.batch_exists(cpu.hashes_of(tokens, prior="ab" * 32)) == 0


def fill(extra, tokens):
    """In a process of its own, with another host memory."""
    cpu.publish(MODELS / "a")
    pool = cpu.mha("page_first", pages=9)
    cpu.scramble(pool, 5)
    one = cpu.controller(pool, "dynamic", extra)
    os._exit(cpu.backup(one, tokens, pool.alloc(len(tokens))))


def begin(function, *given):
    code = f"from tests.integration import sglang_cases; sglang_cases.{function}{given!r}"
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE)


def test_another_process_with_another_host_size_shares(server):
    tokens = prompt(6)
    assert begin("fill", settings(server), tokens).wait(cpu.WAIT_S) == 6
    theirs, pool = cpu.mha("page_first", pages=9), cpu.mha("page_first", pages=30)
    cpu.scramble(theirs, 5)
    with running(pool, server) as one:
        found, read, indices = cpu.prefetch(one, tokens)
        assert (found, read) == (6, 6)
        assert cpu.equal(pool, indices, theirs, theirs.alloc(len(tokens)))


def test_weights_that_are_replaced_end_it(server):
    pool, tokens = cpu.mha("page_first"), prompt(4)
    with told(), running(pool, server) as one:
        indices = pool.alloc(len(tokens))
        assert cpu.backup(one, tokens, indices) == 4
        assert get_serving().weight_version == "default"
        get_context().override("test", weight_version="step-2")
        assert cpu.prefetch(one, tokens)[0] == 0
        assert cpu.backup(one, prompt(4), indices) == 0
        pool.clear()
        with running(pool, server) as again:  # attached anew: a cache of this start only
            assert cpu.prefetch(again, tokens)[0] == 0
            assert cpu.backup(again, tokens, pool.alloc(len(tokens))) == 4
            assert cpu.prefetch(again, tokens)[0] == 4


# ---- side pools ----------------------------------------------------------------------------------


def test_side_pools_with_holes_end_where_files_end(server, tmp_path):
    """Random holes of an ALL_PAGES and a TRAILING pool, the storages called themselves."""
    layout, choose = "page_first", random.Random(7)
    pools = {PoolName.KV: cpu.mha(layout), PoolName.INDEXER: cpu.mha(layout, heads=1),
             PoolName.SWA: cpu.mha(layout, heads=2)}  # fmt: skip
    with running(pools, server) as one, filing(pools[PoolName.KV], tmp_path) as file:
        both = [one.storage_backend, file.storage_backend]
        for name, pool in pools.items():
            both[1].register_mem_host_pool_v2(pool, name)
            cpu.scramble(pool)
        for _ in range(30):
            names = cpu.hashes_of(prompt(12))
            for name in (PoolName.INDEXER, PoolName.SWA, PoolName.KV):
                missing = 0.05 if name == PoolName.KV else 0.2
                kept = [at for at in range(12) if choose.random() > missing]
                indices = torch.cat([torch.arange(at * 64, at * 64 + 64) for at in kept])
                for each in both:
                    transfer = PoolTransfer(name, indices, keys=[names[at] for at in kept])
                    assert all(each.batch_set_v2([transfer])[name])
            memory, end = pools[PoolName.KV].kv_buffer, min({*range(13)} - {*kept})
            saved_bytes = memory.clone()
            memory.zero_()
            read = both[0].batch_get_v1(names, torch.arange(12 * 64))
            assert read == [at < end for at in range(12)] and not memory[:, 64 * end :].any()
            memory[:, 64 * end :] = saved_bytes[:, 64 * end :]
            assert torch.equal(memory.view(torch.int16), saved_bytes.view(torch.int16))
            trailing = PoolTransfer(PoolName.SWA, keys=names[: choose.randint(1, 3)],
                                    hit_policy=PoolHitPolicy.TRAILING_PAGES)  # fmt: skip
            for asked in ([PoolTransfer(PoolName.INDEXER)], [trailing],
                          [PoolTransfer(PoolName.INDEXER), trailing]):  # fmt: skip
                found, oracle = (each.batch_exists_v2(names, asked) for each in both)
                assert (found.kv_hit_pages, found.restorable_prefix_pages) == (
                    oracle.kv_hit_pages, oracle.restorable_prefix_pages)  # fmt: skip
                assert found.extra_pool_hit_pages == oracle.extra_pool_hit_pages
        unknown = PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert both[0].batch_exists_v2(names, [unknown]).kv_hit_pages == 0


def test_two_pools_attach_at_once_to_a_fresh_server():
    """Each is a size of chunks, for which the server has to make room."""
    kv, index = cpu.mha("page_first_direct"), cpu.mha("page_first_direct", heads=1)
    for pool in (kv, index):
        cpu.scramble(pool)
    tokens, pools = prompt(10), {PoolName.KV: kv, PoolName.INDEXER: index}
    with serving(ram_bytes=64 << 20) as fresh, running(pools, fresh) as one:
        begin, side = kv.alloc(len(tokens)), [cpu.sidecar(PoolName.INDEXER)]
        one.write_storage(begin, tokens, cpu.hashes_of(tokens), None, extra_pools=side)
        assert one.ack_backup_queue.get(timeout=cpu.WAIT_S).completed_tokens == len(tokens)
        found, read, indices = cpu.prefetch(one, tokens, [cpu.sidecar(PoolName.INDEXER)])
        assert (found, read) == (10, 10)
        assert all(cpu.equal(pool, begin, pool, indices) for pool in (kv, index))


# ---- tensor-parallel sizes -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_head_groups_go_from_one_rank_to_several_and_back(server, size):
    extra, one, back = {"tp_lcm_size": 4}, cpu.mha("page_head"), cpu.mha("page_head")
    parts = [cpu.mha("page_head", heads=cpu.HEADS // size) for _ in range(size)]
    cpu.scramble(one)
    with told(tp_size=1):
        tokens, others = saved(one, server, 6, extra=extra), prompt(6)
    for number, part in enumerate(parts):
        with told(tp_size=size), running(part, server, extra=extra, tp=(number, size)) as each:
            found, read, indices = cpu.prefetch(each, tokens)
            assert (found, read) == (6, 6) and indices[0] == 0
            heads = slice(number * cpu.HEADS // size, (number + 1) * cpu.HEADS // size)
            same = one.kv_buffer[:, :6, heads]  # K and V, page, head, ...
            assert torch.equal(part.kv_buffer[:, :6].view(torch.int16), same.view(torch.int16))
            part.clear()
            cpu.scramble(part, number)
            assert cpu.backup(each, others, part.alloc(len(others))) == 6
    with told(tp_size=1), running(back, server, extra=extra) as reader:
        assert cpu.prefetch(reader, others)[:2] == (6, 6)
    whole = torch.cat([part.kv_buffer[:, :6] for part in parts], dim=2)
    assert torch.equal(back.kv_buffer[:, :6].view(torch.int16), whole.view(torch.int16))
    with pytest.raises((ConfigError, ValueError), match="3 KV heads"):
        cpu.controller(cpu.mha("page_head", heads=3), "dynamic", settings(server, tp_lcm_size=2))


def rank(number, socket, store, begin):
    """A rank of two: KV of 8 or 6 pages, and a trailing pool with holes."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    cpu.publish(MODELS / "a")
    pools = {PoolName.KV: cpu.mha("page_first"), PoolName.SWA: cpu.mha("page_first", heads=1)}
    extra, tokens = cpu.PLUGIN | {"server": f"unix://{socket}"}, [begin, *range(8 * cpu.PAGE - 1)]
    one, names = cpu.hybrid(pools, "dynamic", extra, tp=(number, 2)), cpu.hashes_of(tokens)
    storage = one.storage_backend
    for name, pages in (
        (PoolName.KV, range((8, 6)[number])), (PoolName.SWA, ((1, 2, 4, 6), (0, 2, 3, 6))[number])
    ):  # fmt: skip
        rows = torch.cat([torch.arange(at * cpu.PAGE, (at + 1) * cpu.PAGE) for at in pages])
        transfer = PoolTransfer(name, rows, keys=[names[at] for at in pages])
        assert all(storage.batch_set_v2([transfer])[name])
    trailing = PoolTransfer(PoolName.SWA, keys=names[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    dist.barrier()
    for pools_asked in ([], [trailing]):
        one.prefetch(cpu.REQUEST, tokens, None, None, extra_pools=pools_asked)
        operation = one.prefetch_hit_queue.get(timeout=cpu.WAIT_S)
        sys.stdout.write(f"{operation.storage_hit_count // cpu.PAGE}\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


@pytest.mark.extended
def test_two_ranks_take_the_shortest_hit_and_what_both_may_end_at(server, tmp_path):
    given = str(server.socket), str(tmp_path / "store"), 1 << 20
    for one in [begin("rank", number, *given) for number in range(2)]:
        said, _ = one.communicate(timeout=cpu.WAIT_S)
        assert said.split()[-2:] == [b"6", b"3"]


# ---- faults --------------------------------------------------------------------------------------


@contextlib.contextmanager
def full(server):
    """Other engines save into all slots of the server."""
    layout = ChunkLayout(bytes(32), 1, 1, (PAGE_BYTES,))
    with contextlib.ExitStack() as ends:
        for number in range(12):
            other = ends.enter_context(attached(server.access(layout)))
            ends.enter_context(other.save(run(number, FEW_SLOTS, layout)))
        yield


@pytest.mark.parametrize("fault", ["absent", "killed", "stopped", "full"])
def test_each_call_ends_without_its_server(tmp_path, fault):
    """Within its bound, with a miss; and all comes back. Also where others have all of its RAM."""
    pool = cpu.mha("page_first")
    cpu.scramble(pool)
    with short_folder() as folder:
        slots = FEW_SLOTS if fault == "full" else 1000
        one = ServerProcess(folder, ram_bytes=slots * (PAGE_BYTES + 4096))
        if fault != "absent":
            one.start()
        with running(pool, one) as controller:
            storage, tokens = controller.storage_backend, prompt(4)
            indices = pool.alloc(len(tokens))
            names, none = cpu.hashes_of(tokens), [False] * 4
            transfer = PoolTransfer(PoolName.KV, indices, keys=names)
            calls = {
                "exists": (lambda: storage.batch_exists(names), 0, 0.1),
                "get": (lambda: storage.batch_get_v1(names, indices), none, 5.0),
                "set": (lambda: storage.batch_set_v2([transfer])[PoolName.KV], none, 5.0),
            }
            for name, (call, miss, bound_s) in calls.items():
                if fault == "stopped":
                    one.pause()
                elif fault == "killed":
                    one.kill()
                with full(one) if fault == "full" else contextlib.nullcontext():
                    begun = time.monotonic()
                    found = call()
                    took = time.monotonic() - begun
                assert (found, took < bound_s + SLACK_S) == (miss, True), name
                if fault == "stopped":
                    one.resume()
                elif fault == "killed":
                    one.start()
                    wait_for(lambda: storage._pools["kv"].server.is_ready, "back")
            if fault == "absent":
                one.start()
            wait_for(lambda: all(storage.batch_set_v1(cpu.hashes_of(tokens), indices)), "back")
            assert cpu.prefetch(controller, tokens)[:2] == (4, 4)
        one.kill()


def test_a_batch_has_the_time_that_its_server_takes_to_answer():
    pool, tokens = cpu.mha("page_first"), prompt(4)
    with serving(ram_bytes=64 << 20) as one, running(pool, one) as controller:
        indices = pool.alloc(len(tokens))
        assert cpu.backup(controller, tokens, indices) == 4
        one.pause()
        threading.Timer(0.3, one.resume).start()
        assert all(controller.storage_backend.batch_get_v1(cpu.hashes_of(tokens), indices))


def test_every_page_of_a_thousand_is_on_nvme_behind_little_ram(tmp_path):
    """RAM of 128 slots. Then a crash of the server and a warm restart, and a damaged byte."""
    pool, count = cpu.mha("page_first", pages=1010), 1000
    cpu.scramble(pool)
    room = {"nvme_path": str(tmp_path), "nvme_bytes": 128 << 20, "ram_bytes": 128 * PAGE_BYTES}
    with serving(**room) as one, running(pool, one) as controller:
        tokens = prompt(count)
        indices = pool.alloc(len(tokens))
        assert cpu.backup(controller, tokens, indices) == count
        storage, names = controller.storage_backend, cpu.hashes_of(tokens)
        kept = storage._pools["kv"]

        def held() -> int:
            return sum(kept.server.known(kept.pages.keys(names)))

        stats = kept.server._client.stats
        wait_for(lambda: stats().get("queued", 1) == 0, "all is written")
        assert stats()["nvme_held"] >= 0.99 * count
        one.kill()
        one.start()
        wait_for(lambda: held() >= 0.99 * count, "warm")
        pool.free(indices[: 64 * 200])
        there = kept.server.known(kept.pages.keys(names))
        chosen = [at for at, is_there in enumerate(there) if is_there][-128:]
        into, pages = torch.arange(64 * 128), [indices[64 * at : 64 * at + 64] for at in chosen]
        assert all(storage.batch_get_v1([names[at] for at in chosen], into))
        assert cpu.equal(pool, torch.cat(pages), pool, into)
        one.stop()
        for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
            for at in range(file.stat().st_size // 8, file.stat().st_size, PAGE_BYTES // 2):
                flip(file, at)
        one.start()
        wait_for(held, "back")
        done = storage.batch_get_v1(names[-300:-200], into[: 64 * 100])
        read = sum(done)
        assert not all(done), "nothing of it was damaged"
        assert cpu.equal(pool, indices[-64 * 300 :][: 64 * read], pool, into[: 64 * read])


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.extended)])
def test_failures_that_sglang_injects_end_no_thread(server, monkeypatch, seconds):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.02")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    pool, others = cpu.mha("page_first", pages=80), 0
    cpu.scramble(pool)
    with running(pool, server) as one:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            tokens = prompt(4)
            begin = pool.alloc(len(tokens))
            stored = cpu.backup(one, tokens, begin)
            found, read, indices = cpu.prefetch(one, tokens)
            assert read <= max(found, stored)
            if read:
                others += 1
                assert cpu.equal(pool, begin[: 64 * read], pool, indices[: 64 * read])
            pool.clear()
        assert one.prefetch_thread.is_alive() and one.backup_thread.is_alive()
        assert one.prefetch_io_aux_thread.is_alive() and others


def test_what_does_not_fit_is_refused_by_name(server, caplog, tmp_path):
    pool = cpu.mha("page_first", page=8, pages=20)
    with pytest.raises((ConfigError, ValueError), match="unknown key sever"):
        cpu.controller(pool, "dynamic", settings(server, sever="unix:///x"))
    with running(pool, server):
        assert "--page-size 8" in caplog.text
    token = tmp_path / "token"
    token.write_text("a" * 32)
    token.chmod(0o600)
    with running(cpu.mha("page_first"), server, extra={"server_token_file": str(token)}) as one:
        assert "pool kv is not kept" in caplog.text
        assert cpu.prefetch(one, prompt(4))[0] == 0
    with running(cpu.mha("page_first"), server) as one:
        for heads in range(5, 23):
            side = cpu.mha("page_first", heads=heads, pages=2)
            one.storage_backend.register_mem_host_pool_v2(side, f"side {heads}")
        wait_for(lambda: "this client" in caplog.text and "sizes" in caplog.text, "said")
        side = cpu.mha("page_first", pages=2)
        side.get_page_buffer_meta = Mock(side_effect=ValueError("Unsupported layout"))
        one.storage_backend.register_mem_host_pool_v2(side, "other")
        assert "pool other is not kept, its pages have no address: Unsupported" in caplog.text
    assert one.storage_backend is None and len(caplog.records) < 80


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_over_tcp_bytes_are_equal(tmp_path, tls):
    """With certificates of both ends, or without."""
    pool, place, keys = cpu.mha("page_first"), f"tcp://127.0.0.1:{free_port()}", {}
    cpu.scramble(pool)
    if tls:
        made, place = make_certificates(tmp_path), f"tcp://localhost:{free_port()}"
        files = {"server_ca": "ours.pem", "server_cert": "ours-host.pem"}
        files |= {"server_key": "ours-host.key"}
        keys = {key: str(made / file) for key, file in files.items()}
    with serving(place, flags=["--insecure"] * (not tls), ram_bytes=64 << 20, **keys):
        far = cpu.PLUGIN | {"server": place} | keys
        controller = cpu.controller(pool, "dynamic", far)
        tokens = prompt(8)
        begin = pool.alloc(len(tokens))
        assert cpu.backup(controller, tokens, begin) == 8
        found, read, indices = cpu.prefetch(controller, tokens)
        assert (found, read) == (8, 8) and cpu.equal(pool, begin, pool, indices)
        controller.detach_storage_backend()


def test_metrics_count_batches_and_clear_forgets(server):
    from sglang.srt.observability.metrics_collector import StorageMetrics  # after its stand-in

    pool, tokens = cpu.mha("page_first"), prompt(4)
    with running(pool, server) as one:
        storage = one.storage_backend
        assert storage.get_stats() is None
        storage._stats = StorageMetrics()
        cpu.backup(one, tokens, pool.alloc(len(tokens)))
        cpu.prefetch(one, tokens)
        stats = storage.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
        assert stats.backup_bandwidth[0] > 0 and storage.get_stats().backup_pgs == []
        for outcome, count in {"hit": 4, "stored": 4, "loaded": 4, "miss": None}.items():
            told = REGISTRY.get_sample_value("kvtier_sglang_pages_total", {"outcome": outcome})
            assert told == count
        storage.clear()
        wait_for(lambda: cpu.prefetch(one, tokens)[0] == 0, "forgotten")
