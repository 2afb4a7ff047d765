"""vLLM's own Scheduler and requests: streaming sessions that go on, and weights that are replaced
between steps."""

from dataclasses import replace

import pytest

from tests.unit.real_scheduler import CHUNK

pytestmark = pytest.mark.vllm

FIRST, MORE = list(range(100, 200)), list(range(300, 400))


class TestSessions:
    """The session's first input has 100 tokens. Then ten are sampled, of which vLLM keeps nine.
    Then 100 more come."""

    def test_an_image_that_comes_later_is_in_the_keys(self, core):
        core.add(core.request("session", FIRST.copy(), max_tokens=10, resumable=True))
        core.run("session")
        core.add(core.request("session", MORE.copy(), {4: "cat"}, max_tokens=10, resumable=True))
        core.run("session")
        session = core.scheduler.requests["session"]
        tokens, at = session.all_token_ids[:], session.mm_features[0].mm_position.offset
        before = at // CHUNK * CHUNK
        assert before < at + 8 <= before + CHUNK
        assert core.hit(core.request("cat", tokens[:], {at: "cat"})) == len(tokens) // CHUNK * CHUNK
        assert core.hit(core.request("dog", tokens[:], {at: "dog"})) == before
        assert core.hit(core.request("elsewhere", tokens[:], {at - 1: "cat"})) == before
        assert core.hit(core.request("text", tokens[:])) == before, (
            "saved before there was an image"
        )

    def test_the_token_that_vllm_takes_back_is_in_no_key(self, core):
        """The sampled tokens end a chunk: the last of them is replaced by the next input's
        first."""
        start = list(range(100, 100 + 3 * CHUNK - 4))
        core.add(core.request("session", start[:], max_tokens=4, resumable=True))
        core.run("session")
        assert core.scheduler.requests["session"].num_tokens == 3 * CHUNK
        half = core.connector._scheduler
        half._keys(half._prompts["session"], 3 * CHUNK)  # as a step that is planned ahead does
        core.add(core.request("session", MORE.copy(), max_tokens=10, resumable=True))
        core.run("session")
        tokens = core.scheduler.requests["session"].all_token_ids[:]
        assert tokens[: 3 * CHUNK] == [*start, 7, 7, 7, MORE[0]]
        whole = len(tokens) // CHUNK * CHUNK
        assert core.hit(core.request("same", tokens[:])) == whole
        assert core.hit(core.request("taken back", [*start, 7, 7, 7, 7, *MORE])) == 2 * CHUNK


class TestReplacedWeights:
    def test_what_was_kept_before_is_never_served_again(self, core):
        core.add(core.request("one", FIRST.copy()))
        core.run("one")
        assert core.hit(core.request("hit", FIRST.copy())) == 3 * CHUNK
        core.add(core.request("two", MORE.copy()))
        core.step(replaced=True)
        core.run("two")
        assert core.hit(core.request("three", FIRST.copy())) == 0

    def test_a_chunk_that_was_refused_to_the_new_weights_stays_for_the_old(self, core):
        half = core.connector._scheduler
        keys = half._layout.keys(FIRST)
        core.add(core.request("one", FIRST.copy()))
        core.run("one")
        assert core.scheduler.reset_prefix_cache()
        core.add(core.request("two", FIRST.copy()))
        assert core.step(replaced=True).kv_connector_metadata.loads
        core.run("two")
        assert half.store.lookup(keys).ready == len(keys)

    def test_a_request_that_was_running_is_not_kept(self, core):
        core.add(core.request("one", FIRST.copy(), max_tokens=2 * CHUNK))
        core.step()
        core.step(replaced=True)
        while "one" in core.scheduler.requests:
            assert not core.step().kv_connector_metadata.saves
        assert core.hit(core.request("two", FIRST.copy())) == 0

    def test_a_request_that_was_waiting_is_kept_under_the_new_keys(self, core):
        core.add(core.request("one", FIRST.copy()))
        early = core.request("waiting", MORE.copy())
        core.connector.get_num_new_matched_tokens(early, 0)
        core.step(replaced=True)
        core.add(early)
        core.run("waiting")
        assert core.hit(core.request("two", MORE.copy())) == 3 * CHUNK

    def test_what_vllm_s_own_cache_still_has_of_before_is_not_kept(self, core):
        core.add(core.request("one", FIRST.copy()))
        core.run("one")
        core.add(core.request("two", MORE.copy()))
        core.step(replaced=True)
        core.add(core.request("three", [*FIRST, *MORE]))
        core.run("three")
        assert core.hit(core.request("four", [*FIRST, *MORE])) == 0, (
            "its first blocks are the old weights'"
        )
        assert core.scheduler.reset_prefix_cache()
        core.add(core.request("five", [*FIRST, *MORE]))
        core.run("five")
        assert core.hit(core.request("six", [*FIRST, *MORE])) == 6 * CHUNK


def test_an_engine_of_which_one_worker_may_keep_no_prefixes_runs_on_and_keeps_none(
    core, monkeypatch, caplog
):
    """Attention layers turn prefix caching off in their own process only."""
    monkeypatch.setattr(core.connector, "_scheduler", None)
    ranks = [core.rank, replace(core.rank, why_no_prefixes="a kernel forbids it")]
    core.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, place): rank for place, rank in enumerate(ranks)}
    )
    assert "a kernel forbids it: kvtier keeps and serves nothing in this engine" in caplog.text
    for name in ("one", "two"):
        core.add(core.request(name, FIRST.copy()))
        core.run(name)
        assert core.scheduler.reset_prefix_cache(reset_connector=True)
    assert core.hit(core.request("three", FIRST.copy())) == 0
    assert core.connector.get_kv_connector_stats() is None
    assert not core.connector.has_pending_push_work()
    assert (
        core.connector.get_external_cache_hit_sources(core.request("four", FIRST.copy()), 0) == {}
    )
    core.connector.shutdown()
