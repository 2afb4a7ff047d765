"""Cache specs and vLLM's offers: what is kept of which group, and what a load is said to bring."""

from __future__ import annotations

from tests.trust.mutations.room import PYTEST, Mutant, Room

_GROUPS, _LAYOUT, _CONNECTOR = (
    "connectors/vllm/groups.py",
    "connectors/vllm/layout.py",
    "connectors/vllm/connector.py",
)

ROOM = Room(
    {
        "specs": (*PYTEST, "tests/unit/connectors/test_vllm_specs.py"),
        "rules": (*PYTEST, "tests/unit/connectors/test_vllm_groups.py"),
        "offers": (*PYTEST, "tests/trust/engine/ported/test_offers.py"),
        "states": ("-m", "tests.trust.engine", "--steps", "400", "--only", "states, drafts"),
    },
    mutants=(
        Mutant(
            "layout.kept",
            "getattr(kv_cache_config, 'prefix_cacheable_group_ids', range(len(every)))",
            "getattr(kv_cache_config, 'transfer_group_ids', range(len(every)))",
            "groups of which vLLM caches nothing are kept: a draft's windows, rings",
        ),
        Mutant(
            "_with_tails.kind",
            "group.kind is Kind.WINDOW and group.block_tokens < longest",
            "False",
            "a convolution of four tokens is kept as a window as long as the longest block",
        ),
        Mutant(
            "KVTierConnector.get_loaded_kv_cache_group_ids",
            "(group.number for group in self._kept.groups)",
            "range(len(self._kv_cache_config.kv_cache_groups))",
            "vLLM reads a window that no load has brought",
        ),
        Mutant(
            "KVTierConnector.supports_divergent_local_hybrid_hits",
            "return False",
            "return True",
            "a prompt whose state vLLM has lost is computed again",
        ),
        Mutant(
            "SchedulerHalf.allocated",
            "prompt.claim.begin + tokens",
            "prompt.claim.run.end",
            "a hit that vLLM has rounded is loaded beyond what was allocated",
        ),
        Mutant(
            "Claims._rows",
            "claim.branch = hits.known",
            "",
            "prompts that branch off within a long one compute their stem for ever",
        ),
        Mutant(
            "Geometry.keep_tokens",
            "max(_KEEP_TOKENS, room)",
            "_KEEP_TOKENS",
            "long windows take several times the room of everything else",
        ),
        Mutant(
            "Geometry.first_block",
            "return number * self.blocks_per_piece(group)",
            "wrong = group.kind is Kind.WINDOW\n"
            "return number * self.blocks_per_piece(group) + wrong",
            "the wrong page of a window is saved",
        ),
        Mutant(
            "layout.kept",
            "every[number].layer_names",
            "(one for one in every[number].layer_names if 'index' not in one)",
            "an indexer's page is left out",
        ),
        Mutant(
            "SchedulerHalf._advance",
            "early = set(told) if output.scheduled_spec_decode_tokens.get(request_id) else set()",
            "early: set[object] = set()",
            "a state is saved as it was before the last tokens were accepted",
        ),
    ),
)
