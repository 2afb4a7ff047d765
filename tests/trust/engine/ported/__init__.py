"""Cases that vLLM's own tests of its offloading and Mooncake-store connectors, of failed loads, of
transfers and of MultiConnector name, as scripts for simulated engines. Each test here names the
cases that it stands for. What it asserts is what a user or an operator would see: every byte that
is read, the fate of each request, and blocks, slots and pins that are free again.

Not here, because kvtier has no such thing:

- ``test_max_offload_tokens_*``, ``test_max_load_tokens_*``, ``test_*_recompute_budget_*``,
  ``test_request_level_policy_*``, ``test_retention_interval_*``, ``test_swa_alignment_skip``,
  ``test_store_mask_*``: parameters of theirs. What kvtier keeps of windows is in
  ``tests/unit/connectors/test_vllm_groups.py``, and when it declines a hit in
  ``test_vllm_scheduler.py``.
- ``TestMaximalPrefixLookup``, ``TestSlidingWindowLookup``, ``test_external_cached_block_pool_*``,
  ``test_process_tokens_*``, ``test_pool_key_*``: parts of their lookup and of their names. kvtier's
  are tested in ``tests/unit/store`` and ``tests/unit/core``.
- ``test_partial_tail_*``, ``test_aligned_boundary_store_*``, ``test_*_fine_grained_*``: hits that
  end inside a block. A hit of kvtier ends with a block, and beside windows and states with a chunk.
- ``test_two_groups_different_block_sizes``: the groups of one engine here have blocks of one size,
  as the tests of ``Geometry`` have not.
- ``TestEagle``: a group of drafts is kept as any other group is, because its KV is that of the
  tokens that were accepted. ``test_saves.py`` has drafts, and
  ``tests/integration/mode_scenarios.py`` a real engine with EAGLE.
- ``test_sync_*``: no load of kvtier's is done inside the step that needs it.
- ``test_*_fail_policy_*``: kvtier sets the policy ``recompute``, or refuses to start.
- ``test_async_loads_count_toward_*``, ``test_priority_scheduling_promotes_*``,
  ``test_block_level_load_failure_fails_closed_*``: rules of vLLM's scheduler, with no connector.
- ``test_*_stats_*``, ``test_*_events_*``, ``test_*_metrics*``,
  ``test_external_cache_hit_sources_*``, ``test_reset_cache_*_role_*``: in
  ``tests/unit/connectors``, ``test_vllm_figures.py``, ``test_vllm_events.py`` and
  ``test_vllm_hooks.py``.
- the caches' own order (``tests/v1/kv_offload``): in ``tests/unit/eviction`` and
  ``tests/unit/store``.
"""
