"""A model class of one's own, for ``model_class_overrides``."""

from vllm.model_executor.models.llama import LlamaForCausalLM


class Unscaled(LlamaForCausalLM):  # type: ignore[misc]
    """Rotates neighbours and not halves: other keys from equal weights."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            layer.self_attn.rotary_emb.is_neox_style = False
