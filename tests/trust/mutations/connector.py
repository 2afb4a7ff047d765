"""The connector's two halves: what is served and saved of a request, and what is not after
something failed."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

ROOM = Room(
    {
        "rules": (
            *PYTEST,
            "tests/unit/connectors/test_vllm_rules.py",
            "tests/unit/connectors/test_vllm_sessions.py",
        ),
        "worker": (*PYTEST, "tests/unit/gpu/test_gpu_worker.py"),
        "scheduler": (*PYTEST, "tests/unit/connectors/test_vllm_scheduler.py"),
        "hooks": (*PYTEST, "tests/unit/connectors/test_vllm_hooks.py"),
        "hints": (*PYTEST, "tests/unit/extensions/hint_dialects/test_hint_middleware.py"),
        "tables": (*PYTEST, "tests/unit/connectors/test_vllm_tables.py"),
        "cases of saves": (*PYTEST, "tests/trust/engine/ported/test_saves.py"),
    },
    (
        # ---- hints ---
        Mutant(
            "Middleware.__call__",
            "waiting: Iterator[Message] | None = None",
            "waiting: Iterator[Message] | None = iter(await self._messages(scope, receive))",
            "whoever has no key keeps 16 MiB open, and the API server reads them",
        ),
        Mutant(
            "dialects._marks_of",
            "_MARK not in raw or raw.count(b'{') > _MOST_BLOCKS",
            "_MARK not in raw",
            "a body of many small objects holds the API server's loop",
        ),
        # ---- engines that are left alone ---
        Mutant(
            "KVTierConnector._begin",
            "whys |= {rank.why_no_prefixes for rank in ranks.values()}",
            "",
            "what an attention layer has turned off in its process is served",
        ),
        # ---- pools ---
        Mutant(
            "metadata.PoolAddress",
            "inode: int = 0",
            "inode: int = field(default=0, compare=False)",
            "after a server's restart a worker copies from the pool of before",
        ),
        Mutant(
            "worker._attached",
            "pool.inode != address.inode",
            "False",
            "a worker maps whatever lies now where a lost server's pool was",
        ),
        # ---- scheduler: what is served ---
        Mutant(
            "scheduler._is_served_elsewhere",
            "request.skip_reading_prefix_cache or (request.kv_transfer_params or "
            "{}).get('do_remote_prefill')",
            "(request.kv_transfer_params or {}).get('do_remote_prefill')",
            "prompt logprobs are asked of a prompt that is not computed",
        ),
        Mutant(
            "Geometry.last_end",
            "tokens - 1",
            "tokens",
            "no token is left to compute",
        ),
        Mutant(
            "tables.loading",
            "max(begin, start, group.first_needed(end))",
            "max(start, group.first_needed(end))",
            "a load writes over blocks that other requests use",
        ),
        Mutant(
            "tables.loading",
            "first - start // block",
            "0",
            "a chunk's first blocks are loaded where its last belong",
        ),
        Mutant(
            "SchedulerHalf._end_load",
            "self.store.invalidate(pending.keys)",
            "",
            "a chunk that cannot be loaded is offered for ever",
        ),
        # ---- scheduler: what is saved ---
        Mutant(
            "SchedulerHalf.step",
            "self._begun_again(new.req_id)",
            "",
            "with Model Runner V2 a resumed request is not kept again",
        ),
        Mutant(
            "RequestProgress.moved",
            "self.saved, self.states = (0, [])",
            "self.saved = 0",
            "states of blocks that a request has no more are still to be kept",
        ),
        Mutant(
            "SchedulerHalf._advance",
            "min(computed + output.num_scheduled_tokens[request_id], known)",
            "known",
            "chunks are saved before they are computed",
        ),
        Mutant(
            "SchedulerHalf._advance",
            "min(computed + output.num_scheduled_tokens[request_id], known)",
            "computed + output.num_scheduled_tokens[request_id]",
            "drafts are saved before they are accepted",
        ),
        Mutant(
            "SchedulerHalf._advance",
            "computed + output.num_scheduled_tokens[request_id]",
            "computed + output.num_scheduled_tokens[request_id] + 1",
            "the newest token's chunk is saved without its last token",
        ),
        Mutant(
            "SchedulerHalf._advance",
            "request.num_tokens if self._duty.save_decode else request.num_prompt_tokens",
            "request.num_tokens",
            "answers are kept where the configuration says not to",
        ),
        Mutant(
            "BlockTables.begin",
            "self._grown[name] = []",
            "pass",
            "a request that was preempted is saved from blocks that are others' now",
        ),
        Mutant(
            "SchedulerHalf.report",
            "pending.done + pending.failed == self._jobs.ranks",
            "pending.done + pending.failed >= 1",
            "a chunk is served when one of two ranks has written it",
        ),
        Mutant(
            "Saves.end",
            "not pending.failed and (not pending.dropped)",
            "pending.done or not pending.failed",
            "a chunk that one rank could not write is served",
        ),
        Mutant(
            "SchedulerHalf.clear",
            "pending.dropped = True",
            "pass",
            "what was being saved at a reset is found after it",
        ),
        Mutant(
            "SchedulerHalf.report",
            "pending.failed += report.failed[number]",
            "pending.done += report.failed[number]",
            "failed saves and loads count as done",
        ),
        Mutant(
            "RequestProgress.retry",
            "self.saved, self.retried = (0, True)",
            "self.retried = True",
            "chunks whose save was refused are never offered again",
        ),
        # ---- scheduler: sessions and replaced weights ---
        Mutant(
            "Prompt.name",
            "shape == self.shape",
            "self.shape",
            "images that a session adds later are in no key",
        ),
        Mutant(
            "Prompt.name",
            "request.num_prompt_tokens",
            "0",
            "tokens that vLLM takes back from a session stay in its keys",
        ),
        Mutant(
            "SchedulerHalf.report",
            "self._renew()",
            "",
            "what old weights computed is served after they were replaced",
        ),
        Mutant(
            "SchedulerHalf._renew",
            "self._old_blocks = True",
            "",
            "what old weights left in vLLM's own cache is saved as the new ones'",
        ),
        Mutant(
            "SchedulerHalf._renew",
            "prompt.leave_alone()",
            "",
            "what a running request had of the old weights is saved",
        ),
        Mutant(
            "SchedulerHalf._renew",
            "del self._prompts[name]",
            "pass",
            "requests that waited while weights were replaced are never kept",
        ),
        # ---- what ranks say together ---
        Mutant(
            "StepReport.aggregate",
            "self.replacements | other.replacements",
            "self.replacements",
            "weights that one rank saw replaced are held to be the old ones",
        ),
        Mutant(
            "StepReport.aggregate",
            "self.done + other.done",
            "self.done | other.done",
            "a rank's word is lost in another's",
        ),
        # ---- loads that a request waits for ---
        Mutant(
            "SchedulerHalf._is_coming_for_others",
            "self._geometry.key(piece, keys) in self._loading",
            "False",
            "each of twenty equal prompts loads the same",
        ),
        Mutant(
            "SchedulerHalf._is_coming_for_others",
            "not self._duty.shares_blocks or not self._loading or len(keys) <= computed // "
            "self._layout.chunk_tokens",
            "not self._loading or len(keys) <= computed // self._layout.chunk_tokens",
            "a request waits for blocks that vLLM does not share",
        ),
        Mutant(
            "SchedulerHalf._end_load",
            "self._loading -= Counter(pending.keys)",
            "",
            "what was loaded once is waited for without end",
        ),
        Mutant(
            "Claims._has_room",
            "self._store.most_held",
            "self._store.pool.slots",
            "requests that wait claim slots of a server that other engines have",
        ),
        Mutant(
            "Claims._has_room",
            "claimed + pieces <= self._store.most_held // 2",
            "True",
            "a queue of requests pins all of RAM",
        ),
        Mutant(
            "Claims._has_room",
            "claim.first or not pieces",
            "not pieces",
            "whoever is first in the queue waits for those behind it",
        ),
        Mutant(
            "Claims._promise_part",
            "if coming and (not self._is_late(prompt, ready)):\n    return None",
            "if coming and (not self._is_late(prompt, ready)):\n"
            "    ready, coming = (ready + coming, 0)",
            "chunks are promised that have not come",
        ),
        Mutant(
            "WorkerHalf._ended",
            "self._bad_blocks.update(job.blocks)",
            "pass",
            "an older vLLM computes on with blocks that were not loaded",
        ),
        Mutant(
            "WorkerHalf._copy_on",
            "self._copy_s(computes)",
            "60.0",
            "one long load stops all other requests",
        ),
        Mutant(
            "KVTierConnector.get_block_ids_with_load_errors",
            "left if _NAMES_FAILED_LOADS else bad | left",
            "left",
            "a vLLM that knows of no names is not told of a failed load",
        ),
        Mutant(
            "WorkerHalf._map_early",
            "self._report.unmapped = f'rank {self._rank}: {error}'",
            "pass",
            "an engine whose workers reach no pool fails at every chunk, for ever",
        ),
        Mutant(
            "KVTierConnector._begin_late",
            "try:\n    ...\nexcept KVTierError as error:\n    ...",
            "try:\n    ...\nexcept ZeroDivisionError as error:\n    ...",
            "a store that cannot be made ends an engine that runs",
        ),
        # ---- worker ---
        Mutant(
            "WorkerHalf.save",
            "metadata.replacements_seen[self._rank] < self._replacements",
            "bool(self._report.replacements)",
            "steps that were planned before the scheduler knew of new weights save what they "
            "computed",
        ),
        Mutant(
            "WorkerHalf.load",
            "if self._has_other_weights(metadata):\n    ...\nelse:\n    ...",
            "self._has_other_weights(metadata)\nif False:\n    ...\nelse:\n    ...",
            "old KV is loaded into a model whose weights were replaced",
        ),
        Mutant(
            "WorkerHalf._has_other_weights",
            "self._replacements += 1",
            "",
            "what new weights computed is saved under the old ones' keys",
        ),
        Mutant(
            "WorkerHalf._has_other_weights",
            "self._report.replacements[self._rank] = self._replacements",
            "",
            "the scheduler never hears that weights were replaced",
        ),
        Mutant(
            "WorkerHalf._has_other_weights",
            "bool(metadata.loads or metadata.saves or self._copying or moves)",
            "False",
            "weights that are written in place are not noticed",
        ),
        Mutant(
            "WorkerHalf.layout",
            "self._model.resolved()",
            "None",
            "no start of any engine finds what another has kept",
        ),
        Mutant(
            "WorkerHalf._copies",
            "blocks[max(0, taken):taken + most]",
            "blocks[:most]",
            "chunks of one load all go to the first one's blocks",
        ),
        Mutant(
            "WorkerHalf._copies",
            "max(0, -taken)",
            "at",
            "of later chunks the wrong part is loaded",
        ),
    ),
)
