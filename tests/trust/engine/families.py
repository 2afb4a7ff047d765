"""``python -m tests.trust.engine --family NAME``: real model classes of vLLM, both halves of the
connector.

``NAME`` (or ``all``): a simulated engine of the family's own model class, see
:mod:`tests.trust.engine.planned`. Its layers are small, and everything else is the class's and
vLLM's: which layers there are, their specs, how they are grouped and how they lie in memory.

``--sweep``: every architecture of vLLM's registry that can be made here, with the dimensions of its
configuration: its specs, and what becomes of it. With ``--table`` as the rows of SPECS.md.
``--bytes``: what is kept of a prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.trust.engine import planning
from tests.trust.engine.asked import DRAFTS, Drafter, ask, world
from tests.trust.engine.drafted import DENSE, DRAFTED
from tests.trust.engine.pretended import pretend

_ENGINE_STEPS = 250
_DENSE = DENSE | {"num_hidden_layers": 4}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
_KIMI_DELTA = {
    "full_attn_layers": [4, 8],
    "kda_layers": [1, 2, 3, 5, 6, 7],
    "head_dim": 32,
    "num_heads": 2,
    "short_conv_kernel_size": 4,
}
_KIMI = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "linear_attn_config": _KIMI_DELTA,
}
_LATENT = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True)
class Family:
    """``small``: fields of the language model that make its simulation cheap. ``v2``: of Model
    Runner V2 alone."""

    architecture: str
    small: Mapping[str, Any]
    v2: bool = False
    drafter: Drafter | None = None


FAMILIES = {
    "Llama": Family("LlamaForCausalLM", _DENSE),
    "Qwen3": Family("Qwen3ForCausalLM", _DENSE),
    "MiniMax M2": Family(
        "MiniMaxM2ForCausalLM", _DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "Mistral": Family("MistralForCausalLM", _DENSE | {"sliding_window": 40}),
    "Gemma 2": Family("Gemma2ForCausalLM", _DENSE | {"sliding_window": 40}),
    "Gemma 3": Family("Gemma3ForCausalLM", _DENSE | {"sliding_window": 40, "num_hidden_layers": 8}),
    "Gemma 3n": Family("Gemma3nForCausalLM", {}),
    "Gemma 4": Family(
        "Gemma4ForCausalLM",
        _DENSE
        | {
            "sliding_window": 40,
            "num_hidden_layers": 12,
            "global_head_dim": 128,
            "vocab_size_per_layer_input": 1024,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gpt-oss": Family("GptOssForCausalLM", _DENSE | {"sliding_window": 40, "num_local_experts": 4}),
    "Llama 4": Family(
        "Llama4ForCausalLM",
        _DENSE
        | {
            "attention_chunk_size": 64,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_hidden_layers": 8,
        },
    ),
    "DeepSeek V3": Family("DeepseekV3ForCausalLM", _LATENT),
    "DeepSeek V3.2": Family("DeepseekV32ForCausalLM", _LATENT),
    "GLM-5": Family("GlmMoeDsaForCausalLM", _LATENT),
    "DeepSeek V4": Family(
        "DeepseekV4ForCausalLM",
        {
            "vocab_size": 1024,
            "num_hidden_layers": 6,
            "hidden_size": 512,
            "num_attention_heads": 64,
            "n_routed_experts": 8,
        },
    ),
    "DeepSeek V4.1": Family(
        "DeepseekV41ForCausalLM",
        {"vocab_size": 1024, "num_hidden_layers": 12, "hidden_size": 512, "n_routed_experts": 8},
        v2=True,
    ),
    "MiniMax M3": Family(
        "MiniMaxM3SparseForCausalLM",
        {
            "vocab_size": 1024,
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen3-Next": Family(
        "Qwen3NextForCausalLM", _DENSE | _EXPERTS | _DELTA | {"num_hidden_layers": 8}
    ),
    "Qwen3.5": Family(
        "Qwen3_5ForConditionalGeneration", _DENSE | _DELTA | {"num_hidden_layers": 8}
    ),
    "Qwen3.8": Family("Qwen4ExpForCausalLM", _DENSE | _EXPERTS | _DELTA | {"num_hidden_layers": 8}),
    "Kimi Linear": Family("KimiLinearForCausalLM", _KIMI),
    "Kimi K3": Family("KimiK3ForConditionalGeneration", _KIMI),
    "GLM-5.3 Flash": Family(
        "Glm5NextForCausalLM",
        _LATENT | {"num_hidden_layers": 8, "linear_head_dim": 32, "linear_num_heads": 2},
    ),
    "Nemotron 3": Family(
        "NemotronHForCausalLM",
        {key: value for key, value in _DENSE.items() if key != "num_hidden_layers"}
        | {
            "layers_block_type": ["mamba", "moe", "mamba", "attention"] * 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "Jamba": Family(
        "JambaForCausalLM",
        {key: value for key, value in _DENSE.items() if key != "head_dim"}
        | {"num_hidden_layers": 8, "num_experts": 2, "mamba_d_state": 4},
    ),
    "Falcon H1": Family(
        "FalconH1ForCausalLM",
        {key: value for key, value in _DENSE.items() if key != "head_dim"}
        | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 16},
    ),
    "Granite 4": Family(
        "GraniteMoeHybridForCausalLM",
        {key: value for key, value in _DENSE.items() if key != "head_dim"}
        | {
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "mamba_d_head": 64,
            "num_local_experts": 4,
        },
    ),
    "LFM2": Family(
        "Lfm2ForCausalLM",
        {key: value for key, value in _DENSE.items() if key != "head_dim"}
        | {"full_attn_idxs": [1, 3]},
    ),
    "OLMo Hybrid": Family("OlmoHybridForCausalLM", _DENSE | _DELTA),
    "Inkling": Family("InklingForCausalLM", {}),
    "HY V4": Family("HYV4ForCausalLM", _LATENT),
    "Mamba 2": Family("Mamba2ForCausalLM", {}),
    "OpenPangu with sinks": Family("PanguProMoEV2ForCausalLM", {}),
    "HRM-Text": Family("HrmTextForCausalLM", {}),
    "Unlimited-OCR": Family("UnlimitedOCRForCausalLM", {}),
}
"""The families of the end of 2026, and kinds of cache that no other has."""
FAMILIES |= {
    name: replace(
        FAMILIES[one.family],
        small={**FAMILIES[one.family].small, **one.fields},
        drafter=one.drafter,
    )
    for name, one in DRAFTED.items()
}


# ---- what becomes of a model ---------------------------------------------------------------------


@dataclass
class Verdict:
    """``verdict``: served, partly (a group is left out), left alone (vLLM caches no prefixes of
    it), refused, or not made (its class cannot be made here)."""

    architecture: str
    verdict: str
    why: str = ""
    groups: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    layers: int = 0
    seconds: float = 0.0


def judged(architecture, text, folder, drafter=None):
    """A start of vLLM with kvtier, up to where the connector's halves are made."""
    from kvtier.core.errors import KVTierError

    begun, asked = time.monotonic(), None
    told = Verdict(architecture, "not made")
    try:
        asked = ask(architecture, text, folder, drafter)
        told = _of_groups(architecture, asked)
    except KVTierError as error:
        told.verdict, told.why = "refused", str(error)
    except Exception as error:  # noqa: BLE001 whatever a class wants that is not here
        refused = _cause(error)
        told.verdict = "refused" if refused else "not made"
        told.why = refused or " ".join(f"{type(error).__name__}: {error}".split())[:300]
    told.seconds = round(time.monotonic() - begun, 2)
    return told, asked


def _cause(error):
    """What kvtier says within an error of vLLM's, else ""."""
    from kvtier.core.errors import KVTierError

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KVTierError):
            return str(seen)
        seen = seen.__cause__ or seen.__context__
    return ""


def _of_groups(architecture, asked):
    from kvtier.connectors.vllm import layout
    from kvtier.connectors.vllm.layout import why_no_prefixes
    from kvtier.core.errors import LayoutError

    told = Verdict(architecture, "served", groups=[], layers=len(asked.specs))
    told.groups = [_group_text(group) for group in asked.groups]
    told.kinds = sorted({_kind_text(spec) for group in asked.groups for spec in _specs(group)})
    plan = planning.of_groups(asked.config, asked.groups, 1 << 44)
    try:
        found = layout.kept(plan, with_groups=True)
    except LayoutError as error:
        told.verdict, told.why = "refused", str(error)
        return told
    if why := why_no_prefixes(asked.config, plan):
        told.verdict, told.why = "left alone", why
    elif len(found.groups) < len(asked.groups):
        told.verdict = "partly"
        told.why = ", ".join(
            _group_text(group) for group in asked.groups if not group.kv_cache_spec.prefix_cacheable
        )
    return told


def _specs(group):
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _kind_text(spec):
    name = type(spec).__name__
    if getattr(getattr(spec, "cache_role", None), "value", "") == "indexer":
        return f"{name} (indexer)"
    if getattr(spec, "bounded_replay", False):
        return f"{name} (replayed)"
    states = getattr(spec, "tokens_per_state", 1)
    return f"{name} ({states} tokens a state)" if states not in (1, -1) else name


def _group_text(group):
    kinds = Counter(_kind_text(spec) for spec in _specs(group))
    each = len(group.layer_names)
    spec = _specs(group)[0]
    reach = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    named = " and ".join(kinds)
    return f"{each} x {named}{f' {reach}' if reach else ''}, blocks of {spec.block_size}"


def registered():
    """Every architecture that generates text, of vLLM's registry."""
    from vllm.model_executor.models import registry

    text, media = registry._TEXT_GENERATION_MODELS, registry._MULTIMODAL_MODELS
    return [*sorted(text), *sorted({*media} - {*text})]


def sweep(names, folder):
    told = []
    for name in names:
        verdict, _ = judged(name, {}, folder)
        told.append(verdict)
        sys.stderr.write(f"{json.dumps(asdict(verdict))}\n")
    return told


def table(told):
    """The rows of SPECS.md: architectures by their specs and by what becomes of them."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in told:
        if one.verdict == "not made":
            here = not one.why.startswith("LookupError")
            specs = "its class wants what is not here" if here else "its configuration is not here"
        else:
            specs = ", ".join(f"`{kind}`".replace(" (", "` (", 1) for kind in one.kinds)
            specs = re.sub(r"\)`", ")", specs) or "-"
        rows.setdefault((one.verdict, specs, ""), []).append(one.architecture)
    for (verdict, specs, _), names in sorted(
        rows.items(), key=lambda row: (_ORDER[row[0][0]], row)
    ):
        counted = verdict == "not made" or (specs == "`FullAttentionSpec`" and verdict == "served")
        listed = "-" if counted else ", ".join(names)
        yield f"| {specs} | {verdict} | {len(names)} | {listed} |"


_ORDER = {"served": 0, "partly": 1, "left alone": 2, "refused": 3, "not made": 4}


# ---- what is kept --------------------------------------------------------------------------------

PROMPT, STEP = 32_768, 8_192
"""Tokens of a prompt, and of a step that computes it."""


@dataclass
class Kept:
    """Bytes of a prompt of so many tokens, of one rank."""

    family: str
    blocks: str
    own: float
    """What vLLM writes for a token in groups of full attention (or windows, if there is nothing
    else)."""
    needed: float
    """What a hit of the whole prompt needs, a token."""
    kept: float
    """What kvtier keeps of the prompt, a token."""
    chunk: int
    ends: int


def kept(name, asked, tokens=PROMPT):
    """What is kept of one prompt of so many tokens that nobody else shares."""
    from kvtier.config.keys import Config
    from kvtier.connectors.vllm import layout
    from kvtier.connectors.vllm.groups import Geometry
    from tests.trust.engine.planned import content_bytes, spec_of

    class Plan:
        kv_cache_groups = asked.groups
        prefix_cacheable_group_ids = tuple(
            number
            for number, group in enumerate(asked.groups)
            if group.kv_cache_spec.prefix_cacheable
        )

    found = layout.kept(Plan, with_groups=True)
    chunk = layout.chunk_tokens(Config().engine.chunk_tokens, found, is_default=True)
    geometry = Geometry(found.groups, chunk)
    block = {
        group.number: sum(content_bytes(spec) for spec in _layer_specs(asked.groups[group.number]))
        for group in found.groups
    }
    slot = max(block[group.number] * geometry.blocks_per_piece(group) for group in found.groups)
    end = (tokens - 1) // chunk * chunk
    ends = [one for one in range(chunk, end + 1, chunk) if geometry.is_kept(one, tokens)]
    if geometry.has_state:  # vLLM has states where a prefill step ends, and at the prompt's end
        steps = [*range(max(1, STEP // chunk) * chunk, end, max(1, STEP // chunk) * chunk), end]
        ends = [
            one
            for begin, one in zip([0, *steps], steps, strict=False)
            if geometry.is_state_kept(one, begin, tokens)
        ]
    trunk = geometry.trunk(0, end // chunk)
    pieces = set(trunk) | {piece for one in ends for piece in geometry.behind(one)}
    anchors = {group.number for group in geometry.anchors}
    own = sum(
        block[group.number] / group.block_tokens
        for group in found.groups
        if group.number in anchors
    )
    last = [*trunk, *geometry.behind(end)]
    needed = sum(
        block[piece.group.number] * geometry.blocks_per_piece(piece.group) for piece in last
    )
    sizes = sorted({spec_of(group).block_size for group in asked.groups})
    return Kept(
        name,
        "/".join(map(str, sizes)),
        own,
        needed / end,
        len(pieces) * slot / end,
        chunk,
        len(ends) if geometry.others else 0,
    )


def _layer_specs(group):
    spec = group.kv_cache_spec
    if hasattr(spec, "kv_cache_specs"):
        return list(spec.kv_cache_specs.values())
    return [spec] * len(group.layer_names)


# ---- simulation ----------------------------------------------------------------------------------


def simulate(name, steps, seed, folder):
    """One family: both schedulers, loads that fail, few blocks, drafts where it has them."""
    from kvtier.core.errors import KVTierError
    from tests.server_process import short_folder
    from tests.trust.engine.cells import Cell
    from tests.trust.engine.driven import Told, drive
    from tests.trust.engine.planned import PlannedEngine

    family = FAMILIES[name]
    asked = ask(family.architecture, family.small, folder, family.drafter)
    drafts = DRAFTS if family.drafter else 0
    fast: dict[str, Any] = {"v2": True, "async_scheduling": True, "drafts": drafts}
    cells = (
        Cell(name, drafts=drafts),
        Cell(f"{name}, v2, async", **fast),
        Cell(f"{name}, v2, async, failing loads", fails=0.2, **fast),
    )
    for cell in cells[family.v2 :]:
        told, begun, number = Told(cell.name), time.monotonic(), seed
        while told.counts["steps"] < steps and not told.violations:
            with short_folder() as place:
                engine = PlannedEngine(cell, asked, place, random.Random(f"{cell.name} {number}"))
                try:
                    drive(engine, min(_ENGINE_STEPS, steps))
                except KVTierError:
                    raise
                except Exception as error:  # noqa: BLE001 whatever ends an engine is a violation
                    engine.violations.append(f"the engine died: {type(error).__name__}: {error}")
                finally:
                    engine.close()
            told.violations += [f"{cell.name}, seed {number}: {one}" for one in engine.violations]
            told.counts.update(engine.counts)
            number += 1
        marks = {"faults": cell.fails, "accepted drafts": drafts, "refused drafts": drafts}
        for mark in ("loads", "finished", *(mark for mark, shown in marks.items() if shown)):
            if not told.counts[mark] and not told.violations:
                told.violations.append(f"{cell.name}: not in force: {mark}")
        told.seconds = round(time.monotonic() - begun, 1)
        yield told


# ---- the command ---------------------------------------------------------------------------------


def main():
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES, "all"], metavar="NAME")
    parser.add_argument("--steps", type=int, default=500, help="steps a cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="", help="architectures, as a regular expression")
    parser.add_argument("--table", action="store_true", help="the sweep as the rows of SPECS.md")
    parser.add_argument("--bytes", action="store_true")
    given = parser.parse_args()
    _quiet()
    pretend()

    with tempfile.TemporaryDirectory(prefix="kvtier-families-") as place, world(Path(place)):
        return _run(given, Path(place))


def _run(given, folder):
    if given.sweep:
        names = [name for name in registered() if re.search(given.only, name)]
        told = sweep(names, folder)
        if given.table:
            sys.stdout.write("\n".join(table(told)) + "\n")
            return 0
        sys.stdout.write(json.dumps([asdict(one) for one in told]) + "\n")
        return 0
    every = given.family is None or "all" in given.family
    names = list(FAMILIES) if every else given.family
    if given.bytes:
        found = []
        for name in names:
            fields: Mapping[str, Any] = DRAFTED[name].fields if name in DRAFTED else {}
            family = FAMILIES[name]
            _, asked = judged(family.architecture, fields, folder, family.drafter)
            if asked is not None:
                found.append(asdict(kept(name, asked)))
                sys.stderr.write(f"{json.dumps(found[-1])}\n")
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    return _simulated(names, given.steps, given.seed, folder)


def _simulated(names, steps, seed, folder):
    violations, cells = list[str](), {}
    for name in names:
        try:
            for told in simulate(name, steps, seed, folder):
                sys.stderr.write(f"{told}\n")
                violations += told.violations
                cells[told.cell] = dict(told.counts)
        except Exception as error:  # noqa: BLE001 whatever a class or kvtier says
            why = _cause(error) or f"{type(error).__name__}: {error}"
            cells[name] = {"none": " ".join(why.split())}
            sys.stderr.write(f"{name}: {cells[name]}\n")
    line = {"violations": violations, "cells": cells}
    sys.stdout.write(json.dumps(line) + "\n")
    return bool(violations)


def _quiet():
    """Before vLLM is imported."""
    import logging

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    os.environ["TRITON_INTERPRET"] = "1"  # torch imports Triton, which looks at it once
    logging.disable(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
