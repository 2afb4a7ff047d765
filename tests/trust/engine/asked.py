"""What vLLM's own model classes ask for: their cache specs, and what vLLM's planner makes of them.

A class is made on the meta device with a configuration that is made here: the defaults of its
configuration class, which are mostly those of a published checkpoint. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.trust.engine import planning
from tests.trust.engine.pretended import alone, on_meta

PARSER = "made_here"
"""The name of the parser of configurations that are made here."""
DRAFTS = 2
"""Draft tokens a step."""
_MADE: dict[str, Any] = {}
"""The configurations, by model."""
Text = Mapping[str, Any]
"""Fields of the language model's configuration."""


@dataclass
class Asked:
    """A model's layers, in vLLM's cache groups."""

    config: Any
    """vLLM's."""
    specs: dict[str, Any]
    """By layer."""
    groups: list[Any]
    layers: dict[str, Any]
    """vLLM's modules."""

    @property
    def layout(self):
        """The order of vLLM's one allocation."""
        return self.config.cache_config.get_resolved_kv_cache_layout()


def _parser():
    from vllm.transformers_utils.config import register_config_parser
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

    class MadeHere(ConfigParserBase):  # type: ignore[misc]
        def parse(self, model, *more, **named):
            found = copy.deepcopy(_MADE[str(model)])  # vLLM makes it a draft model's
            return found.to_dict(), found

    register_config_parser(PARSER)(MadeHere)


# ---- configurations ------------------------------------------------------------------------------


@cache
def _types():
    """Model types of transformers by architecture."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for name, table in vars(modeling_auto).items():
        if name.endswith("MAPPING_NAMES"):
            for kind, classes in table.items():
                for one in (classes,) if isinstance(classes, str) else classes:
                    found.setdefault(str(one), []).append(kind)
    return found


def configuration(architecture, text):
    """Raises LookupError where there is no configuration class here."""
    from transformers import CONFIG_MAPPING

    text = {**LAYERS.get(architecture, {}), **text}
    make = BY_HAND.get(architecture)
    if make is not None:
        found = make(text)
    else:
        kinds = sorted(set(_types().get(TYPES.get(architecture, architecture), [])))
        if architecture in TYPES and TYPES[architecture] in CONFIG_MAPPING:
            kinds = [TYPES[architecture]]
        if not kinds:
            raise LookupError("its configuration class is in its checkpoint")
        wanted = [kind for kind in kinds if kind.endswith("_text")]
        kind = (wanted or kinds)[0] if architecture.endswith("CausalLM") else kinds[0]
        found = _made(CONFIG_MAPPING[kind], text)
    found.architectures = [architecture]
    for name, value in ADDED.get(architecture, {}).items():
        text_config = found.get_text_config()
        setattr(text_config, name, getattr(text_config, str(value), value))
    return found


def _made(kind, text):
    if "text_config" in getattr(kind, "sub_configs", {}):
        return kind(text_config=dict(text)) if text else kind()
    return kind(**text)


TYPES = {
    "AXK1ForCausalLM": "axk1",
    "Glm5NextForCausalLM": "glm5_next_text",
    "LLaMAForCausalLM": "llama",
    "IQuestCoderForCausalLM": "llama",
    "InternLM3ForCausalLM": "llama",
    "TeleChat3ForCausalLM": "llama",
    "MiMoForCausalLM": "qwen2",
    "DeepseekForCausalLM": "deepseek_v3",
    "PhiMoEForCausalLM": "phimoe",
    "NemotronHPuzzleForCausalLM": "nemotron_h",
    "MuseGlimmerForCausalLM": "muse_glimmer",
    "LlamaBidirectionalModel": "llama",
    "Qwen2ForRewardModel": "qwen2",
    "Qwen2ForProcessRewardModel": "qwen2",
    "SolarForCausalLM": "llama",
    "Rnj1ForCausalLM": "gemma3_text",
    "DeepseekV3BidirectionalModel": "deepseek_v3",
    "DeepseekOCR2ForCausalLM": "deepseek_ocr2",
    "LongcatFlashNgramForCausalLM": "longcat_flash",
    "Eagle3LlamaForCausalLM": "llama",
    "DFlashDraftModel": "qwen3",
    "Qwen3DSparkModel": "qwen3",
}
"""Model types of architectures that transformers does not name."""


LAYERS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {
        "num_hidden_layers": 40,
        "layer_types": [*["mamba"] * 9, "attention"] * 4,
    },
    "Lfm2ForCausalLM": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "NemotronHForCausalLM": {
        "layers_block_type": [*["mamba", "moe"] * 3, "mamba", "attention", "moe"] * 6
    },
}
"""What the layers are, where the defaults of a class have one kind only."""
_GLM5_NEXT = {
    "mhc": True,
    "mla_use_nope": True,
    "indexer_rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
ADDED: dict[str, dict[str, Any]] = {
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "Lfm2ForCausalLM": {"block_dim": "hidden_size", "conv_dim": "hidden_size"},
    "Qwen4ExpForCausalLM": {"output_gate_type": "silu"},
    "Qwen4ExpForConditionalGeneration": {"output_gate_type": "silu"},
    "Glm5NextForCausalLM": _GLM5_NEXT,
    "Glm5NextForConditionalGeneration": _GLM5_NEXT,
}
"""Fields that checkpoints have and configuration classes do not. A name is another field's."""


def _of_vllm(name, **fields):
    """One that vLLM has no longer is transformers'."""
    places = map(importlib.import_module, ("vllm.transformers_utils.configs", "transformers"))
    kind = next(getattr(place, name) for place in places if hasattr(place, name))
    return kind(**fields)


def _deepseek_v4(text):
    layers = text.get("num_hidden_layers", 43)
    ratios = [0, 0, *(4 if number % 2 == 0 else 128 for number in range(2, layers))]
    fields = {
        "num_hidden_layers": layers,
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "topk_method": "noaux_tc",
        "num_hash_layers": 3,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "compress_ratios": ratios,
        "compress_rope_theta": 160000.0,
        "num_nextn_predict_layers": 1,
        "expert_dtype": "fp4",
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
            "rope_theta": 10000.0,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    return _of_vllm("DeepseekV4Config", **fields | dict(text))


def _deepseek_v41(text):
    base = _deepseek_v4({}).to_dict()
    layers = text.get("num_hidden_layers", 40)
    sources = [number for number in range(2, layers) if number % 4 == 2] or [2]
    quant = base.pop("quantization_config")
    base |= {
        "num_hidden_layers": layers,
        "compress_ratios": [
            0 if number < 2 else 1 + (len(sources) - 1 - (number - 2) // 4) % 2
            for number in range(layers)
        ],
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": sources,
    }
    of_class = ("architectures", "model_type", "transformers_version", "rope_parameters")
    for name in (*of_class, "layer_types", "mlp_layer_types"):
        base.pop(name, None)
    base["rope_scaling"] = _deepseek_v4({}).rope_scaling
    return _of_vllm("DeepseekV41Config", text_config=base | dict(text), quantization_config=quant)


def _linear(layers):
    """Three layers of Kimi delta attention, then one of MLA. Layers are counted from one."""
    full = [number for number in range(1, layers + 1) if not number % 4]
    return {
        "full_attn_layers": full,
        "kda_layers": [number for number in range(1, layers + 1) if number not in full],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    }


def _kimi_fields(text):
    layers = text.get("num_hidden_layers", 27)
    fields = {
        "hidden_size": 2304,
        "head_dim": 72,
        "intermediate_size": 9216,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "linear_attn_config": _linear(layers),
        "max_position_embeddings": 1048576,
    }
    return fields | dict(text)


def _kimi_linear(text):
    return _of_vllm("KimiLinearConfig", **_kimi_fields(text))


def _kimi_k3(text):
    return _of_vllm("KimiK3Config", text_config=_kimi_fields(text))


def _k3_dspark(text):
    return _of_vllm("K3DSparkConfig", **text)


def _minimax_m3(text):
    layers = text.get("num_hidden_layers", 60)
    sparse = [0] * min(3, layers - 1) + [1] * (layers - min(3, layers - 1))
    attention = {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": text.get("num_key_value_heads", 4),
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_disable_index_value": sparse,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": sparse,
    }
    fields = {"sparse_attention_config": attention, "moe_layer_freq": sparse} | dict(text)
    return _of_vllm("MiniMaxM3Config", text_config=fields)


def _inkling(text):
    fixed = {
        "gate_activation": "sigmoid",
        "norm_after_topk": True,
        "shared_expert_sink": True,
        "inference_moe_w13_interleaved": True,
        "n_shared_experts": 1,
    }
    return _of_vllm("InklingModelConfig", **fixed | dict(text))


def _unlimited_ocr(text):
    return _of_vllm("UnlimitedOCRConfig", **({"text_config": dict(text)} if text else {}))


BY_HAND: dict[str, Callable[[Text], Any]] = {
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "DeepseekV4ForConditionalGeneration": _deepseek_v4,
    "DeepseekV41ForCausalLM": _deepseek_v41,
    "KimiLinearForCausalLM": _kimi_linear,
    "KimiK3ForConditionalGeneration": _kimi_k3,
    "K3DSparkModel": _k3_dspark,
    "MiniMaxM3SparseForCausalLM": _minimax_m3,
    "MiniMaxM3SparseForConditionalGeneration": _minimax_m3,
    "InklingForCausalLM": _inkling,
    "UnlimitedOCRForCausalLM": _unlimited_ocr,
}
"""Configurations whose fields are a checkpoint's, because their class has no defaults for them."""


# ---- asking --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafter:
    """How a model's tokens are drafted. ``architecture``: of the draft model. "" where its layers
    are in the model's own checkpoint."""

    method: str
    architecture: str = ""
    text: Text = field(default_factory=dict)

    def speculative(self, folder):
        """vLLM's configuration of it."""
        words: dict[str, Any] = {"method": self.method, "num_speculative_tokens": DRAFTS}
        if self.architecture:
            place = folder / f"drafts-{self.architecture}"
            place.mkdir(parents=True, exist_ok=True)
            _MADE[str(place)] = configuration(self.architecture, self.text)
            words["model"] = str(place)
        return words


def ask(architecture, text, folder, drafter=None, **arguments):
    """``arguments``: of vLLM's engine. Whatever a start of vLLM raises."""
    if drafter is not None:
        arguments["speculative_config"] = drafter.speculative(folder)
    config = configured(architecture, text, folder, **arguments)
    with contextlib.redirect_stdout(io.StringIO()):
        layers = _built(config)
    specs = _specs(config)
    return Asked(config, specs, _groups(config, specs, layers), layers)


def configured(architecture, text, folder, **arguments):
    """vLLM's configuration of an engine with kvtier."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.transformers_utils import config as parsers

    if PARSER not in parsers._CONFIG_FORMAT_TO_CONFIG_PARSER:
        _parser()
    place = folder / architecture
    place.mkdir(parents=True, exist_ok=True)
    _MADE[str(place)] = configuration(architecture, text)
    given = {
        "max_model_len": 8192,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "language_model_only": True,
        "kv_transfer_config": {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"ram_bytes": 1 << 20, "log_level": "ERROR"},
        },
    }
    return EngineArgs(
        model=str(place),
        config_format=PARSER,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        **given | arguments,
    ).create_engine_config()


def _built(config):
    """The model's layers that have a cache. The model itself is let go."""
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    with set_current_vllm_config(config), on_meta():
        initialize_model(config)
        if config.speculative_config is not None:
            drafts = config.speculative_config.apply_draft_overrides(config)
            own, drawn = config.speculative_config, config.speculative_config.draft_model_config
            prefix = "draft_model" if own.method == "draft_model" else ""
            initialize_model(drafts, prefix=prefix, model_config=drawn)
        current_platform.update_block_size_for_backend(config)
    layers: dict[str, Any] = get_layers_from_vllm_config(config, AttentionLayerBase)
    return layers


def _specs(config):
    """As vLLM's worker collects them."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with set_current_vllm_config(config):
        found: dict[str, Any] = get_kv_cache_spec(config)
    return found


def _groups(config, specs, layers):
    """As vLLM's engine core plans them (``EngineCore._initialize_kv_caches``)."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(config)
    if any(getattr(spec, "non_causal", False) for spec in specs.values()):
        config.cache_config.enable_prefix_caching = False
    with set_current_vllm_config(config):
        backends = get_current_attn_backends(config)
        orders = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        order = resolve_kv_cache_layout(config, [orders], list(specs.values()))
        config.cache_config.kv_cache_layout = order.name
        groups: list[Any] = planning.of_specs(config, specs, 1 << 44).kv_cache_groups
    return groups


@contextlib.contextmanager
def world(folder):
    """This process is the only rank of an engine."""
    from vllm.config import VllmConfig

    alone(VllmConfig(), folder)
    yield
