"""What vLLM's scheduler shows to a connector: a request, and the plan of a step."""

from types import SimpleNamespace


def vllm_request(tokens, request_id="one", salt=None):
    return SimpleNamespace(
        request_id=request_id,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        num_output_tokens=0,
        num_computed_tokens=0,
        num_preemptions=0,
        max_tokens=16,
        get_finished_reason=lambda: None,
        all_token_ids=tokens,
        skip_reading_prefix_cache=False,
        prompt_embeds=None,
        lora_request=None,
        cache_salt=salt,
        mm_features=None,
        kv_transfer_params=None,
    )


def planned(new=(), tokens=None, state=None, **cached):
    """``new``: its new requests. ``tokens``: computed for each request. ``cached``: of the others.
    ``state``: their block tables, where vLLM tells them."""
    none: dict[str, object] = {"req_ids": [], "new_block_ids": [], "num_computed_tokens": []}
    return SimpleNamespace(
        kv_connector_block_state=state,
        scheduled_new_reqs=[*new],
        scheduled_cached_reqs=SimpleNamespace(**none | {"resumed_req_ids": set()} | cached),
        num_scheduled_tokens=tokens or {},
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=sum((tokens or {}).values()),
    )
