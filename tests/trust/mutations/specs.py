"""Cache specs and vLLM's offers: what is kept of which group, and what a load is said to bring."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_GROUPS, _LAYOUT, _CONNECTOR = (
    "connectors/vllm/groups.py",
    "connectors/vllm/layout.py",
    "connectors/vllm/connector.py",
)
_SCHEDULER = "connectors/vllm/scheduler_side/scheduler.py"

ROOM = Room(
    {
        "specs": (*PYTEST, "tests/unit/connectors/test_vllm_specs.py"),
        "rules": (*PYTEST, "tests/unit/connectors/test_vllm_groups.py"),
        "offers": (*PYTEST, "tests/trust/engine/ported/test_offers.py"),
        "states": ("-m", "tests.trust.engine", "--steps", "400", "--only", "states, drafts"),
    },
    mutants=(
        Mutant(
            _LAYOUT,
            'getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(every)))',
            'getattr(kv_cache_config, "transfer_group_ids", range(len(every)))',
            "groups of which vLLM caches nothing are kept: a draft's windows, rings",
        ),
        Mutant(
            _LAYOUT,
            "        is_short = group.kind is Kind.WINDOW and group.block_tokens < longest\n",
            "        is_short = False\n",
            "a convolution of four tokens is kept as a window as long as the longest block",
        ),
        Mutant(
            _CONNECTOR,
            "return tuple(group.number for group in self._kept.groups)",
            "return tuple(range(len(self._kv_cache_config.kv_cache_groups)))",
            "vLLM reads a window that no load has brought",
        ),
        Mutant(
            _CONNECTOR,
            '        could not be loaded."""\n        return False\n',
            '        could not be loaded."""\n        return True\n',
            "a prompt whose state vLLM has lost is computed again",
        ),
        Mutant(
            _SCHEDULER,
            "        end, geometry = prompt.claim.begin + tokens, self._geometry\n",
            "        end, geometry = prompt.claim.run.end, self._geometry\n",
            "a hit that vLLM has rounded is loaded beyond what was allocated",
        ),
        Mutant(
            "connectors/vllm/scheduler_side/claims.py",
            "        claim.branch = hits.known\n",
            "",
            "prompts that branch off within a long one compute their stem for ever",
        ),
        Mutant(
            _GROUPS,
            "        return -(-max(_KEEP_TOKENS, room) // unit) * unit\n",
            "        return -(-_KEEP_TOKENS // unit) * unit\n",
            "long windows take several times the room of everything else",
        ),
        Mutant(
            _GROUPS,
            "            return number * self.blocks_per_piece(group)\n",
            "            wrong = group.kind is Kind.WINDOW\n"
            "            return number * self.blocks_per_piece(group) + wrong\n",
            "the wrong page of a window is saved",
        ),
        Mutant(
            _LAYOUT,
            "frozenset(every[number].layer_names) for",
            'frozenset(one for one in every[number].layer_names if "index" not in one) for',
            "an indexer's page is left out",
        ),
        Mutant(
            _SCHEDULER,
            "early = set(told) if output.scheduled_spec_decode_tokens.get(request_id) else set()",
            "early: set[object] = set()",
            "a state is saved as it was before the last tokens were accepted",
        ),
    ),
)
