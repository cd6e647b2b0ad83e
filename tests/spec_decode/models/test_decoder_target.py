"""Targets of this library's layers, compared with the same checkpoints in `transformers`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attn_backends import get
from builders import RequestTables
from spec_decode.model_api import DraftInputs, DraftModel, TargetModel, TargetStates
from spec_decode.models import CheckpointError, TransformersTarget, load_draft
from spec_decode.models.causal_lm import load_target
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.decoder import DecoderTarget
from spec_decode.models.layer_windows import ARCHITECTURES, FULL, RECURRENT, SLIDING
from spec_decode.models.target_fields import read_fields, unserved
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import KVGroup, build_ragged, make_group, make_state_groups
from spec_decode.paged.state_group import StateGroup
from tests.factories import CPU, make_tables

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from spec_decode.models.hf.folder import check_model  # noqa: E402

TEXT = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(5))
PAGE, WINDOW = 4, 6
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    # Large, so that attention is sharp and a wrong mask or angle shows.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 48}
WIDE_YARN = {**YARN, "rope_theta": 5e5, "attention_factor": 1.3, "beta_fast": 2.0, "beta_slow": 0.5}
SLIDES = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
GEMMA = {
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
        SLIDING: {"rope_type": "default", "rope_theta": 40.0},
    },
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
SIGMOID = {
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
}
OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "truncate": False,
}
OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "rope_parameters": OSS_YARN,
    "swiglu_limit": 0.5,
}
STATES = {
    "layer_types": [RECURRENT, FULL, RECURRENT, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
SHARED = {**MIXTURE, "shared_expert_intermediate_size": 20}
NEVER_NORMED = {name: value for name, value in SHARED.items() if name != "norm_topk_prob"}
ALIKE = {**STATES, "linear_num_value_heads": 2, "linear_value_head_dim": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"num_key_value_heads": 4}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "llama-biased": ("Llama", {"attention_bias": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {**SLIDES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.2}}),
    "qwen3-window": ("Qwen3", {**SLIDES, "attention_bias": True}),
    "phi-3": ("Phi3", {"sliding_window": None}),
    "phi-3-window": ("Phi3", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "gemma-3": ("Gemma3", GEMMA),
    "gemma-3-untied": (
        "Gemma3",
        {
            **GEMMA,
            "rope_parameters": None,
            "num_key_value_heads": 1,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma-3-capped": ("Gemma3", {**GEMMA, "final_logit_softcapping": 2.0}),
    "olmo-2": ("Olmo2", {}),
    "olmo-3": (
        "Olmo3",
        {"sliding_window": WINDOW, "rope_parameters": {FULL: WIDE_YARN, SLIDING: {"rope_theta": 5e5}}},
    ),
    "granite": ("Granite", GRANITE),
    "qwen3-moe": ("Qwen3Moe", MIXTURE),
    "qwen3-moe-some-dense": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": False, "mlp_only_layers": [0]}),
    "qwen3-moe-every-other": ("Qwen3Moe", {**MIXTURE, "decoder_sparse_step": 2, **SLIDES}),
    "qwen3-yarn-plain": ("Qwen3", {"rope_parameters": {**OSS_YARN, "truncate": True}}),
    "gpt-oss": ("GptOss", OSS),
    "gpt-oss-plain": ("GptOss", {**OSS, "attention_bias": False, "layer_types": [FULL, FULL, SLIDING, FULL]}),
    "glm-4.5": ("Glm4Moe", {**SIGMOID, "n_group": 3, "topk_group": 2, "attention_bias": True, "use_qk_norm": True}),
    "glm-4.5-air": ("Glm4Moe", {**SIGMOID, "norm_topk_prob": False}),
    "qwen3.5": ("Qwen3_5", {**STATES, "attention_bias": True}),
    "qwen3.5-tied": ("Qwen3_5", {**ALIKE, "layer_types": None, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**STATES, **NEVER_NORMED}),
    "qwen3-next": ("Qwen3Next", {**STATES, **SHARED, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3-next-every-other": ("Qwen3Next", {**ALIKE, **SHARED, "decoder_sparse_step": 2}),
}
WITH_STATES = tuple(kind for kind, (family, _) in KINDS.items() if family in ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next"))


NESTED = ("Gemma3", "Qwen3_5", "Qwen3_5Moe")
"""Families whose Config is that of a model with pictures."""


def configuration(family: str) -> Any:
    return getattr(transformers, f"{family}{'TextConfig' if family in NESTED else 'Config'}")


def make_model(kind: str, **changes: Any) -> Any:
    """A random fp32 model of `transformers` with its own attention, whose biases and norms do something."""
    family, fields = KINDS[kind]
    config = configuration(family)(**{**SIZES, **fields, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "sinks", "A_log")):
                parameter.data.normal_()
            elif name.endswith("norm.weight"):
                parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return model


@cache
def folder_of(kind: str) -> Path:
    folder = Path(mkdtemp())
    make_model(kind).save_pretrained(folder)
    return folder


def load(folder: Path, states: tuple[int, ...] | None = None) -> DecoderTarget:
    store = TensorStore.open(folder)
    assert unserved(store) is None
    return load_target(store, lambda _: states, dtype=torch.float32, device=CPU)


def paged(model: TargetModel | DraftModel) -> tuple[list[KVGroup | StateGroup], RequestTables]:
    described, backend = model.layer_groups(PAGE), get("torch_reference")
    groups: list[KVGroup | StateGroup] = [
        make_group(g.name, backend, g.spec, g.layers, num_pages=64 // PAGE, device=CPU) for g in described
    ]
    if isinstance(model, TargetModel):
        groups += make_state_groups("target", model.state_groups(len(TEXT)), backend, 1, CPU)
    return groups, make_tables([64], page_sizes=[PAGE] * len(described) + [64] * (len(groups) - len(described)))


def whole(target: TargetModel) -> tuple[torch.Tensor, TargetStates]:
    """The logits and states of the text, in one forward."""
    groups, tables = paged(target)
    batch, metadata = build_ragged(groups, tables, [len(TEXT)], [len(TEXT)])
    states = target(TEXT, batch.positions, PagedAttention(groups, metadata))
    return target.logits(states.hidden), states


def drafted(draft: DraftModel, states: TargetStates) -> torch.Tensor:
    """The states of a draft for the text, in one forward."""
    groups, tables = paged(draft)
    batch, metadata = build_ragged(groups, tables, [len(TEXT)], [len(TEXT)])
    return draft(DraftInputs(TEXT, states.hidden, batch.positions, PagedAttention(groups, metadata)))


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within 1e-5 of numbers that are about 1."""
    return off(found, wanted) <= 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_transformers_own(kind: str) -> None:
    target, own = load(folder_of(kind)), make_model(kind)

    assert close(whole(target)[0], own(TEXT[None]).logits[0])
    assert target.batch_invariant is (kind not in WITH_STATES) and target.num_layers == 4 and target.vocab_size == 64


@pytest.mark.parametrize("kind", KINDS)
def test_states_match_those_of_transformers_targets(kind: str) -> None:
    layers = (2, 0, 4, 1)
    found = whole(load(folder_of(kind), layers))[1]
    wanted = whole(TransformersTarget(make_model(kind), aux_hidden_state_layers=layers))[1]

    assert close(found.target_hidden_states, wanted.target_hidden_states) and close(found.hidden, wanted.hidden)
    plain = whole(load(folder_of(kind)))[1]
    assert plain.target_hidden_states is plain.hidden


@pytest.mark.parametrize("layers", [(), (5,), (-1, 2)])
def test_missing_aux_layers_are_rejected_by_our_targets(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"0 to 4, got \("):
        load(folder_of("llama-2"), layers)


def test_tied_head_shares_the_embeddings_storage() -> None:
    tied, untied = load(folder_of("smollm2")), load(folder_of("llama-2"))
    assert tied.output_projection.data_ptr() == tied.embed.weight.data_ptr()
    assert untied.output_projection.data_ptr() != untied.embed.weight.data_ptr()


def test_scaled_logits_have_no_output_projection() -> None:
    assert load(folder_of("granite")).output_projection is load(folder_of("gemma-3-capped")).output_projection is None


def test_gemma_rounds_its_embeddings_and_norms_as_transformers_does(tmp_path: Path) -> None:
    """The factor has the dtype of the weights, and a norm's weight is added to 1 in fp32."""
    own = make_model("gemma-3").bfloat16()
    own.save_pretrained(tmp_path)
    target = load_target(TensorStore.open(tmp_path), dtype=torch.bfloat16, device=CPU)
    found = target.embed(TEXT)

    assert torch.equal(found, own.model.embed_tokens(TEXT)) and target.embed.scale != 32**0.5
    assert torch.equal(target.norm(found)[1], own.model.norm(found))


def test_logits_are_capped_in_fp32() -> None:
    target = load_target(TensorStore.open(folder_of("gemma-3-capped")), dtype=torch.bfloat16, device=CPU)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()

    assert torch.equal(target.logits(hidden), 2 * (target.lm_head.product(hidden).float() / 2).tanh())


@pytest.mark.parametrize("kind", ["llama-3", "qwen3-moe", "gemma-3-capped", "granite", "gpt-oss"])
def test_draft_and_target_of_one_folder_agree(kind: str) -> None:
    target = load(folder_of(kind))
    draft = load_draft(folder_of(kind), target, dtype=torch.float32)
    logits, states = whole(target)

    assert torch.equal(draft.logits(drafted(draft, states)), logits)


@pytest.mark.parametrize("kind", ["glm-4.5"])
def test_glm_without_a_draft_layer_drafts_as_a_whole(kind: str, copied: Path) -> None:
    """transformers writes that there is one, and saves none."""
    target = load(copied)
    with pytest.raises(CheckpointError, match=r"got 0\. .* correct config.json: with 0 layers, the whole model drafts"):
        load_draft(copied, target, dtype=torch.float32)
    (copied / "config.json").write_text(json.dumps({**config_of(copied), "num_nextn_predict_layers": 0}))
    draft = load_draft(copied, target, dtype=torch.float32)
    assert draft.logits(drafted(draft, states := whole(target)[1])).equal(target.logits(states.hidden))


FOREIGN = {
    "hidden_act": ["gelu", "relu", "silu"],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "pretraining_tp": [2, 1],
    "partial_rotary_factor": [0.5, 1.0],
    "rope_interleaved": [True, False],
    "logits_scaling": [2.0, -2.0, 0.0],
    "logit_scale": [0.5],
    "final_logit_softcapping": [3.0],
    "attn_logit_softcapping": [3.0],
    "attention_multiplier": [0.1],
    "residual_multiplier": [0.1, 0.0],
    "embedding_multiplier": [2.0, -2.0],
    "query_pre_attn_scalar": [24],
    "attention_chunk_size": [4],
    "sliding_window": [WINDOW],
    "layer_types": [[SLIDING, FULL, SLIDING, FULL]],
    "sliding_window_pattern": [3, 0],
    "rope_local_base_freq": [20.0],
    "hidden_activation": ["gelu", "gelu_pytorch_tanh"],
    "use_bidirectional_attention": [True, False],
    "original_max_position_embeddings": [8],
    "rope_theta": [50.0],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 2.0}, {}],
    "shared_expert_intermediate_size": [8, 0],
    "use_mrope": [True, False],
    "qkv_bias": [True, False],
    "use_qk_norm": [True, False],
    "unk_token_id": [0],
    "num_nextn_predict_layers": [1, 3],
    "num_mtp_layers": [0],
    "moe_layer_freq": [2],
    "scoring_func": ["softmax"],
    "swiglu_limit": [0.1],
    "swiglu_alpha": [1.0],
    "experts_per_token": [1],
    "initial_context_length": [8],
    "attention_dropout": [0.5],
    "eos_token_id": [3, [3, 4]],
    "torch_dtype": ["bfloat16"],
    "quantization_config": [{"quant_method": "fp8"}],
    "auto_map": [{"AutoModelForCausalLM": "modeling.Other"}],
    "full_attention_interval": [2, 0, 9],
    "attn_output_gate": [True, False],
    "mamba_ssm_dtype": ["float32", "bfloat16"],
    "mtp_num_hidden_layers": [1],
    "mtp_use_dedicated_embeddings": [True],
    "no_such_field": [1, None],
}
"""Values of fields that a config.json can have beside those that its family reads."""
ROPE = {
    "rope_theta": [50.0, None],
    "rope_type": ["default", "linear", "yarn", "dynamic", None],
    "type": ["linear"],
    "factor": [3.0, None],
    "low_freq_factor": [2.0],
    "high_freq_factor": [8.0],
    "original_max_position_embeddings": [32, None],
    "attention_factor": [2.0],
    "beta_fast": [8.0],
    "beta_slow": [1.5, 64.0],
    "mscale": [0.5],
    "mscale_all_dim": [2.0],
    "truncate": [True, False, None],
    "partial_rotary_factor": [0.5, 1.0],
    "mrope_section": [[2, 1, 1], [2], "other"],
    "mrope_interleaved": [True],
    "no_such_field": [1],
}
MUTATED = (
    "llama-3", "mistral-window", "qwen2-window", "qwen3-window", "qwen3-moe", "glm-4.5", "gpt-oss",
    "phi-3-window", "gemma-3", "olmo-2", "olmo-3", "granite", "qwen3.5", "qwen3.5-moe", "qwen3-next",
)  # fmt: skip
MUTATED_ALWAYS = ("llama-3",)
"""The others among the slow tests: they take a minute together."""
ABSENT = object()


def other_values(value: Any) -> list[Any]:
    """Values unlike the one in the file, absence among them."""
    if isinstance(value, bool):
        return [ABSENT, None, not value]
    if isinstance(value, int | float):
        return [ABSENT, None, value + 1, max(value - 1, 1e-6), value * 2]
    if isinstance(value, list):
        return [ABSENT, None, value[::-1], value[:-1], [0], []]
    return [ABSENT, None, {} if isinstance(value, dict) else "other"]


def differs(folder: Path, config: dict[str, Any]) -> str:
    """What is wrong with our target of this config.json: nothing if it is refused, left to transformers, or has the
    logits of transformers' own."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        check_model(folder)
        store = TensorStore.open(folder)
        if unserved(store) is not None:
            return ""
        found = whole(load_target(store, dtype=torch.float32, device=CPU))[0]
    except CheckpointError:
        return ""
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return "" if close(found, wanted := own(TEXT[None]).logits[0]) else f"off by {off(found, wanted)}"


def mutations(kind: str, field: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    values = [*other_values(config.get(field)), *FOREIGN.get(field, [])]
    if field == "rope_parameters":
        values += other_sections(config[field])
    return [changed(config, field, value) for value in values]


def other_sections(section: dict[str, Any]) -> list[dict[str, Any]]:
    found = [changed(section, name, value) for name in ROPE for value in [ABSENT, *ROPE[name]]]
    for kind in section.keys() & {FULL, SLIDING}:
        found += [changed(section, kind, other) for other in (ABSENT, None, {}, *other_sections(section[kind]))]
    return found


def changed(fields: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    others = {key: old for key, old in fields.items() if key != name}
    return others if value is ABSENT else {**others, name: value}


def older(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as older versions of the library wrote it."""
    moved = {"rope_parameters": "rope_scaling", "num_local_experts": "num_experts", "dtype": "torch_dtype"}
    found = {moved.get(name, name): value for name, value in config.items() if name != "layer_types"}
    rope = dict(found.pop("rope_scaling"))
    if SLIDING in rope:
        if config["model_type"] == "gemma3_text":
            found["rope_local_base_freq"] = rope[SLIDING]["rope_theta"]
        rope = dict(rope[FULL])
    return {**found, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}


def ignored(folder: Path, kind: str, field: str, config: dict[str, Any]) -> dict[str, str]:
    return {str(c.get(field)): wrong for c in mutations(kind, field, config) if (wrong := differs(folder, c))}


@pytest.fixture
def copied(kind: str, tmp_path: Path) -> Path:
    return Path(copytree(folder_of(kind), tmp_path / "target"))


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        pytest.param(kind, field, marks=[] if kind in MUTATED_ALWAYS else [pytest.mark.slow, pytest.mark.long])
        for kind in MUTATED
        for field in sorted({*read_fields(ARCHITECTURES[f"{KINDS[kind][0]}ForCausalLM"]), *FOREIGN})
    ],
)
def test_no_field_is_ignored(kind: str, field: str, copied: Path) -> None:
    assert ignored(copied, kind, field, config_of(copied)) == {}


OLDER = {
    "llama-3": ("rope_theta", "rope_scaling"),
    "smollm2": ("rope_theta", "rope_scaling", "tie_word_embeddings"),
    "qwen2-window": ("rope_theta", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "olmo-3": ("rope_theta", "rope_scaling"),
    "gemma-3": ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern", "tie_word_embeddings"),
    "gpt-oss": ("rope_theta", "rope_scaling", "swiglu_alpha", "layer_types", "num_experts"),
    "qwen3-moe": ("num_experts", "mlp_only_layers", "decoder_sparse_step"),
}


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in OLDER.items() for field in fields])
def test_no_field_of_older_layouts_is_ignored(kind: str, field: str, copied: Path) -> None:
    config = older(config_of(copied))

    (copied / "config.json").write_text(json.dumps(config))
    assert close(whole(load(copied))[0], whole(load(folder_of(kind)))[0])
    assert ignored(copied, kind, field, config) == {}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"logits_scaling": 2.0}, "config.json has logits_scaling, which our layers do not know"),
        ({"mlp_bias": True}, "mlp_bias in config.json is True, and our layers compute False only"),
        ({"model_type": "mistral"}, "architectures ['LlamaForCausalLM'] and model_type 'mistral'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "a rotary embedding of type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0}}, "of type linear has no factor"),
        ({"rope_parameters": {"rope_type": "default", "mscale": 9.0}}, "has mscale, which our layers do not know"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "both rope_parameters and rope_scaling"),
    ],
)
@pytest.mark.parametrize("kind", ["llama-2"])
def test_reason_names_the_field_that_is_left_to_transformers(kind: str, copied: Path, fields: Any, why: str) -> None:
    (copied / "config.json").write_text(json.dumps({**config_of(copied), **fields}))
    assert why in str(unserved(TensorStore.open(copied)))


@pytest.mark.parametrize("kind", ["olmo-3"])
def test_one_rotary_embedding_for_all_layers_is_left_to_transformers(kind: str, copied: Path) -> None:
    (copied / "config.json").write_text(json.dumps({**config_of(copied), "rope_parameters": WIDE_YARN}))
    why = r"rope_parameters in .* must have full_attention and sliding_attention, .* got attention_factor"
    assert re.search(why, str(unserved(TensorStore.open(copied))))


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1": ("llama-3", {"bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "bfloat16"}),
    "a fine-tuned Llama": ("llama-3", {"quantization_config": None}),
    "SmolLM2": ("smollm2", {"_model_name_or_path": "x", "unk_token_id": 0, "is_llama_config": True,
                            "rope_interleaved": False, "pretraining_tp": 1, "transformers.js_config": {}}),
    "Mistral-7B": ("mistral-window", {"_name_or_path": "x", "torch_dtype": "bfloat16"}),
    "Qwen2.5": ("qwen2", {"use_mrope": False, "use_sliding_window": False, "sliding_window": 131072}),
    "Qwen3": ("qwen3", {"rope_scaling": None, "max_window_layers": 36, "sliding_window": None}),
    "Phi-3-mini": ("phi-3-window", {"rope_scaling": None, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
                                    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}),
    "Gemma-3": ("gemma-3", {"cache_implementation": "hybrid", "final_logit_softcapping": None}),
    "GPT-OSS": ("gpt-oss", {"experts_per_token": 2, "initial_context_length": 4096, "router_aux_loss_coef": 0.9}),
    "GLM-4.5": ("glm-4.5", {"partial_rotary_factor": 0.5, "rope_scaling": None, "torch_dtype": "bfloat16"}),
    "Qwen3.5": ("qwen3.5-moe", {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "full_attention_interval": 4,
                                "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rope_scaling": None,
                                "mlp_only_layers": [], "partial_rotary_factor": 0.25}),
    "Qwen3-Next": ("qwen3-next", {"rope_scaling": None, "rope_theta": 10000.0, "full_attention_interval": 4}),
    "Qwen3-Coder": ("qwen3-moe", {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
}  # fmt: skip
"""Fields of published files of these families, beside those that the library writes today."""


@pytest.mark.parametrize(("kind", "fields"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_fields_keep_a_target_on_our_layers(kind: str, copied: Path, fields: dict[str, Any]) -> None:
    config = older(config_of(copied)) if "rope_scaling" not in fields else config_of(copied)
    (copied / "config.json").write_text(json.dumps({**config, **fields}))
    assert close(whole(load(copied))[0], whole(load(folder_of(kind)))[0])


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe", "qwen3-next", "glm-4.5"])
@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}], ids=str)
def test_null_as_rotated_part_is_left_to_transformers(kind: str, rope: dict[str, Any], copied: Path) -> None:
    """There, it is no default."""
    config = {**config_of(copied), "partial_rotary_factor": None, **rope}
    (copied / "config.json").write_text(json.dumps(config))
    assert "config.json has null as partial_rotary_factor" in str(unserved(TensorStore.open(copied)))


@pytest.mark.parametrize("kind", ["llama-2", "qwen3-moe", "qwen3.5"])
def test_states_of_absent_layers_are_refused_before_tensors_are_read(kind: str, copied: Path) -> None:
    store = TensorStore.open(copied)
    read: list[int] = []
    store.on_read = read.append
    with pytest.raises(ValueError, match=r"0 to 4, got \(1, 9\)"):
        load_target(store, lambda _: (1, 9), dtype=torch.float32, device=CPU)
    assert not read


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("mistral", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("qwen3-moe", "norm_topk_prob"),
        ("qwen2", "vocab_size"),
    ],
)
def test_absent_field_with_a_familys_default_is_left_to_transformers(kind: str, field: str, copied: Path) -> None:
    (copied / "config.json").write_text(json.dumps(changed(config_of(copied), field, ABSENT)))
    assert f"config.json has no {field}, whose default" in str(unserved(TensorStore.open(copied)))


@pytest.mark.parametrize("kind", ["llama-2"])
def test_tensors_beside_the_layers_are_left_to_transformers(kind: str, copied: Path) -> None:
    path = copied / "model.safetensors"
    save_file({**load_file(path), "model.layers.0.self_attn.kv_scale": torch.ones(1)}, path, {"format": "pt"})
    assert "the weights have model.layers.0.self_attn.kv_scale" in str(unserved(TensorStore.open(copied)))
    save_file({**load_file(path), "model.layers.0.mlp.more.weight": torch.ones(1)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"2 unexpected tensors: model\.layers\.0\.mlp\.more"):
        load_target(TensorStore.open(copied), dtype=torch.float32, device=CPU)
