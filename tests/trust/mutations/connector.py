"""The connector's two halves: what is served and saved of a request, and what is not after
something failed."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_SCHEDULER = "connectors/vllm/scheduler_side/scheduler.py"
_SAVES = "connectors/vllm/scheduler_side/saves.py"
_PROMPTS = "connectors/vllm/scheduler_side/prompts.py"
_PROGRESS = "connectors/vllm/scheduler_side/progress.py"
_WORKER = "connectors/vllm/worker_side/worker.py"
_METADATA = "connectors/vllm/metadata.py"

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
            "extensions/hint_dialects/middleware.py",
            "        waiting: Iterator[Message] | None = None\n",
            "        waiting: Iterator[Message] | None = iter(await self._messages(scope, "
            "receive))\n",
            "whoever has no key keeps 16 MiB open, and the API server reads them",
        ),
        Mutant(
            "extensions/hint_dialects/dialects.py",
            ' or raw.count(b"{") > _MOST_BLOCKS:',
            ":",
            "a body of many small objects holds the API server's loop",
        ),
        # ---- engines that are left alone ---
        Mutant(
            "connectors/vllm/connector.py",
            "        whys |= {rank.why_no_prefixes for rank in ranks.values()}\n",
            "",
            "what an attention layer has turned off in its process is served",
        ),
        # ---- pools ---
        Mutant(
            _METADATA,
            "    inode: int = 0\n",
            "    inode: int = field(default=0, compare=False)\n",
            "after a server's restart a worker copies from the pool of before",
        ),
        Mutant(
            _WORKER,
            "    if pool.inode != address.inode:\n",
            "    if False:\n",
            "a worker maps whatever lies now where a lost server's pool was",
        ),
        # ---- scheduler: what is served ---
        Mutant(
            _SCHEDULER,
            (
                "    return bool(\n"
                "        request.skip_reading_prefix_cache\n"
                '        or (request.kv_transfer_params or {}).get("do_remote_prefill")\n'
                "    )\n"
            ),
            '    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))\n',
            "prompt logprobs are asked of a prompt that is not computed",
        ),
        Mutant(
            "connectors/vllm/groups.py",
            "(tokens - 1) // step * step",
            "tokens // step * step",
            "no token is left to compute",
        ),
        Mutant(
            "connectors/vllm/tables.py",
            "first = max(begin, start, group.first_needed(end)) // block",
            "first = max(start, group.first_needed(end)) // block",
            "a load writes over blocks that other requests use",
        ),
        Mutant(
            "connectors/vllm/tables.py",
            "blocks, first - start // block))",
            "blocks, 0))",
            "a chunk's first blocks are loaded where its last belong",
        ),
        Mutant(
            _SCHEDULER,
            "            self.store.invalidate(pending.keys)\n",
            "",
            "a chunk that cannot be loaded is offered for ever",
        ),
        # ---- scheduler: what is saved ---
        Mutant(
            _SCHEDULER,
            "            self._begun_again(new.req_id)\n",
            "",
            "with Model Runner V2 a resumed request is not kept again",
        ),
        Mutant(
            _PROGRESS,
            "        self.saved, self.states = 0, []\n",
            "        self.saved = 0\n",
            "states of blocks that a request has no more are still to be kept",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "min(computed + output.num_scheduled_tokens[request_id], known) // size",
            "known // size",
            "chunks are saved before they are computed",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "min(computed + output.num_scheduled_tokens[request_id], known) // size",
            "(computed + output.num_scheduled_tokens[request_id]) // size",
            "drafts are saved before they are accepted",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "min(computed + output.num_scheduled_tokens[request_id], known) // size",
            "min(computed + output.num_scheduled_tokens[request_id] + 1, known) // size",
            "the newest token's chunk is saved without its last token",
        ),
        Mutant(
            _SCHEDULER,
            "known = request.num_tokens if self._duty.save_decode else request.num_prompt_tokens",
            "known = request.num_tokens",
            "answers are kept where the configuration says not to",
        ),
        Mutant(
            "connectors/vllm/tables.py",
            "                self._grown[name] = []\n",
            "                pass\n",
            "a request that was preempted is saved from blocks that are others' now",
        ),
        Mutant(
            _SCHEDULER,
            "            if pending.done + pending.failed == self._jobs.ranks:",
            "            if pending.done + pending.failed >= 1:",
            "a chunk is served when one of two ranks has written it",
        ),
        Mutant(
            _SAVES,
            "        if not pending.failed and not pending.dropped:\n            lease",
            "        if pending.done or not pending.failed:\n            lease",
            "a chunk that one rank could not write is served",
        ),
        Mutant(
            _SCHEDULER,
            "            pending.dropped = True\n",
            "            pass\n",
            "what was being saved at a reset is found after it",
        ),
        Mutant(
            _SCHEDULER,
            "            pending.failed += report.failed[number]",
            "            pending.done += report.failed[number]",
            "failed saves and loads count as done",
        ),
        Mutant(
            _PROGRESS,
            "            self.saved, self.retried = 0, True",
            "            self.retried = True",
            "chunks whose save was refused are never offered again",
        ),
        # ---- scheduler: sessions and replaced weights ---
        Mutant(
            _PROMPTS,
            "if self.left_alone or shape == self.shape:",
            "if self.left_alone or self.shape:",
            "images that a session adds later are in no key",
        ),
        Mutant(
            _PROMPTS,
            "shape = request.num_prompt_tokens, len(",
            "shape = 0, len(",
            "tokens that vLLM takes back from a session stay in its keys",
        ),
        Mutant(
            _SCHEDULER,
            "            self._renew()\n",
            "",
            "what old weights computed is served after they were replaced",
        ),
        Mutant(
            _SCHEDULER,
            "        self._old_blocks = True\n",
            "",
            "what old weights left in vLLM's own cache is saved as the new ones'",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "            self._drop(prompt)\n            prompt.leave_alone()\n",
            "            self._drop(prompt)\n",
            "what a running request had of the old weights is saved",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "            del self._prompts[name]\n",
            "            pass\n",
            "requests that waited while weights were replaced are never kept",
        ),
        # ---- what ranks say together ---
        Mutant(
            _METADATA,
            "            replacements=self.replacements | other.replacements,",
            "            replacements=self.replacements,",
            "weights that one rank saw replaced are held to be the old ones",
        ),
        Mutant(
            _METADATA,
            "            done=self.done + other.done,",
            "            done=self.done | other.done,",
            "a rank's word is lost in another's",
        ),
        # ---- loads that a request waits for ---
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            "        return self._geometry.key(piece, keys) in self._loading",
            "        return False",
            "each of twenty equal prompts loads the same",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/scheduler.py",
            (
                "        if (\n"
                "            not self._duty.shares_blocks\n"
                "            or not self._loading\n"
                "            or len(keys) <= computed // self._layout.chunk_tokens\n"
                "        ):\n"
            ),
            "        if not self._loading or len(keys) <= computed // self._layout.chunk_tokens:\n",
            "a request waits for blocks that vLLM does not share",
        ),
        Mutant(
            _SCHEDULER,
            "        self._loading -= Counter(pending.keys)\n",
            "",
            "what was loaded once is waited for without end",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/claims.py",
            "        return claimed + pieces <= self._store.most_held // 2\n",
            "        return claimed + pieces <= self._store.pool.slots // 2\n",
            "requests that wait claim slots of a server that other engines have",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/claims.py",
            "        return claimed + pieces <= self._store.most_held // 2",
            "        return True",
            "a queue of requests pins all of RAM",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/claims.py",
            "        if claim.first or not pieces:",
            "        if not pieces:",
            "whoever is first in the queue waits for those behind it",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/claims.py",
            "        if coming and self._load_policy.clock() < claim.until:\n            "
            "return None\n",
            "        if coming and self._load_policy.clock() < claim.until:\n"
            "            ready, coming = ready + coming, 0\n",
            "chunks are promised that have not come",
        ),
        Mutant(
            _WORKER,
            "            self._bad_blocks.update(job.blocks)\n",
            "            pass\n",
            "an older vLLM computes on with blocks that were not loaded",
        ),
        Mutant(
            _WORKER,
            "        until = begun + self._copy_s(computes)\n        while self._copying",
            "        until = begun + 60.0\n        while self._copying",
            "one long load stops all other requests",
        ),
        Mutant(
            "connectors/vllm/connector.py",
            "        return left if _NAMES_FAILED_LOADS else bad | left",
            "        return left",
            "a vLLM that knows of no names is not told of a failed load",
        ),
        Mutant(
            _WORKER,
            '            self._report.unmapped = f"rank {self._rank}: {error}"',
            "            pass",
            "an engine whose workers reach no pool fails at every chunk, for ever",
        ),
        Mutant(
            "connectors/vllm/connector.py",
            "        except KVTierError as error:\n            logger.error",
            "        except ZeroDivisionError as error:\n            logger.error",
            "a store that cannot be made ends an engine that runs",
        ),
        # ---- worker ---
        Mutant(
            _WORKER,
            "        refused = metadata.replacements_seen[self._rank] < self._replacements",
            "        refused = bool(self._report.replacements)",
            "steps that were planned before the scheduler knew of new weights save what they "
            "computed",
        ),
        Mutant(
            _WORKER,
            "        if self._has_other_weights(metadata):\n",
            "        self._has_other_weights(metadata)\n        if False:\n",
            "old KV is loaded into a model whose weights were replaced",
        ),
        Mutant(
            _WORKER,
            "        self._replacements += 1\n",
            "",
            "what new weights computed is saved under the old ones' keys",
        ),
        Mutant(
            _WORKER,
            "        self._report.replacements[self._rank] = self._replacements\n",
            "",
            "the scheduler never hears that weights were replaced",
        ),
        Mutant(
            _WORKER,
            "        looks = bool(metadata.loads or metadata.saves or self._copying or moves)",
            "        looks = False",
            "weights that are written in place are not noticed",
        ),
        Mutant(
            _WORKER,
            "model=self._model.resolved(),",
            "model=None,",
            "no start of any engine finds what another has kept",
        ),
        Mutant(
            "connectors/vllm/worker_side/worker.py",
            "blocks[max(0, taken) : taken + most]",
            "blocks[:most]",
            "chunks of one load all go to the first one's blocks",
        ),
        Mutant(
            "connectors/vllm/worker_side/worker.py",
            "first, ids = max(0, -taken), blocks",
            "first, ids = at, blocks",
            "of later chunks the wrong part is loaded",
        ),
    ),
)
