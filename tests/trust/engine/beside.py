"""A connector beside ours under vLLM's MultiConnector: as NIXL does it, it answers the handshake
with something of its own, and brings the prompt of a request whose prefill was done elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from tests.trust.engine.memory import RankMemory, chain

MODULE = __name__


@dataclass
class Address(KVConnectorHandshakeMetadata):
    """Where this rank can be reached."""

    port: int


@dataclass
class Transfers(KVConnectorMetadata):
    """``(request, salt, tokens, blocks)`` of each prompt to bring."""

    wanted: list[tuple[str, str, list[int], list[int]]] = field(default_factory=list)


class PrefilledElsewhere(KVConnectorBase_V1):
    """Both halves. ``memory`` of a worker is set by the simulated engine."""

    memory: RankMemory

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._wanted = Transfers()
        self._ended = set[str]()
        self.brought = 0

    # ---- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches):
        return

    def get_handshake_metadata(self):
        return Address(5_600)

    def start_load_kv(self, forward_context, **kwargs):
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Transfers)
        for name, salt, tokens, blocks in metadata.wanted:
            self.memory.write([blocks], np.array(chain(salt, tokens), np.uint64), 0, sound=True)
            self._ended.add(name)
            self.brought += 1

    def wait_for_layer_load(self, layer_name):
        return

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        return

    def wait_for_save(self):
        return

    def get_finished(self, finished_req_ids):
        ended, self._ended = self._ended, set()
        return None, ended

    # ---- scheduler -------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        foreign = [one for one in metadata.values() if not isinstance(one, Address)]
        if foreign:
            raise ValueError(f"expected an Address of every rank, got {foreign}")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        count = (request.num_prompt_tokens - 1) // self._block * self._block - num_computed_tokens
        return max(0, count), count > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            request.kv_transfer_params["do_remote_prefill"] = False
            count = (request.num_prompt_tokens - 1) // self._block * self._block
            ids = list(blocks.get_block_ids()[0])
            tokens = list(request.prompt_token_ids[:count])
            self._wanted.wanted.append((request.request_id, request.cache_salt or "", tokens, ids))

    def build_connector_meta(self, scheduler_output):
        wanted, self._wanted = self._wanted, Transfers()
        return wanted

    def request_finished(self, request, block_ids):
        return False, None

    def take_events(self):
        return ()
