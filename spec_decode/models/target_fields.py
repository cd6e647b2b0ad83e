"""Whether this library's layers compute all that a target's config.json asks for.

`transformers` defines what each field means to each family. A field that is not listed here may mean something, so a
config.json that has it is left to `transformers`: nothing is ignored in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.folder_kind import is_mxfp4
from spec_decode.models.checkpoints.fp8_layout import FIELD
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.layer_ropes import has_layer_ropes, read_layer_ropes
from spec_decode.models.layer_windows import HYBRIDS
from spec_decode.models.layers.rope import rope_section
from spec_decode.models.text_section import TARGETS, WITH_PICTURES, TextSection

_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
"""Fields that have no default here: the families' own differ. So has intermediate_size, but where every layer has a
mixture."""
_MIXTURE = ("num_experts_per_tok", "moe_intermediate_size")
_STATES = tuple(
    f"linear_{name}"
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
)
_HYBRID = ("num_key_value_heads", "head_dim", *_STATES)
_ALSO_REQUIRED = {
    "llama": (),
    "mistral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
    "qwen3_moe": ("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    "phi3": (),
    "gemma3_text": ("num_key_value_heads", "head_dim", "query_pre_attn_scalar"),
    "olmo2": (),
    "olmo3": (),
    "granite": (),
    "glm4_moe": (
        "num_key_value_heads",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "n_routed_experts",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "first_k_dense_replace",
    ),
    "gpt_oss": ("num_key_value_heads", "head_dim", "num_experts_per_tok", "sliding_window"),
    "qwen3_next": (*_HYBRID, *_MIXTURE, "norm_topk_prob", "num_experts", "shared_expert_intermediate_size"),
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": (*_HYBRID, *_MIXTURE, "num_experts", "shared_expert_intermediate_size"),
}
_ONLY_MIXTURES = ("qwen3_5_moe_text",)
_READ = (
    "model_type", "architectures", "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta",
    "rope_parameters", "rope_scaling",
)  # fmt: skip
"""Further fields that every family reads."""
_SWITCHED_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_LAYER_KINDS = (
    "attention_bias", "layer_types", "full_attention_interval", "partial_rotary_factor", "mlp_only_layers",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
)  # fmt: skip
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_ALSO_READ = {
    "llama": ("attention_bias",),
    "mistral": ("sliding_window",),
    "qwen2": (*_SWITCHED_WINDOW, "layer_types"),
    "qwen3": (*_SWITCHED_WINDOW, "layer_types", "attention_bias"),
    "qwen3_moe": (*_SWITCHED_WINDOW, "num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
    "phi3": ("sliding_window", "original_max_position_embeddings", "auto_map"),
    "gemma3_text": (
        "layer_types",
        "sliding_window",
        *_PATTERN,
        "attention_bias",
        "rope_local_base_freq",
        "final_logit_softcapping",
    ),
    "olmo2": ("attention_bias",),
    "olmo3": ("layer_types", "sliding_window", "attention_bias"),
    "granite": ("attention_bias", *_MULTIPLIERS),
    "glm4_moe": ("attention_bias", "use_qk_norm", "partial_rotary_factor", "num_nextn_predict_layers"),
    "gpt_oss": ("attention_bias", "layer_types", "num_experts", "num_local_experts", "swiglu_alpha", "swiglu_limit"),
    "qwen3_next": (*_LAYER_KINDS, "decoder_sparse_step"),
    "qwen3_5_text": _LAYER_KINDS,
    "qwen3_5_moe_text": (*_LAYER_KINDS, "intermediate_size"),
}
"""Fields that the layers of a family read, and those of them that have no meaning to a family, as max_window_layers to
Qwen3-MoE, or only to the layer that drafts for it. auto_map names code in folders of Phi-3, which `transformers` does
not run: it has its own."""
_FIXED: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
}
"""Fields of which one value is computed, in families that do not read them."""
_ALSO_FIXED: dict[str, dict[str, object]] = {
    "qwen2": {"use_mrope": False},
    "qwen3_moe": {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    **{family: {"attn_output_gate": True, "mamba_ssm_dtype": "float32"} for family in HYBRIDS},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
}
"""The same for one family."""
_NO_EFFECT = frozenset({
    "_name_or_path", "_model_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset",
    "transformers_version", "dtype", "torch_dtype", "use_cache", "cache_implementation", "initializer_range",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "finetuning_task",
    "task_specific_params", "tokenizer_class", "prefix", "return_dict", "output_attentions", "output_hidden_states",
    "output_router_logits", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef", "is_llama_config",
    "transformers.js_config", "unsloth_fixed", "unsloth_version",
    "experts_per_token", "initial_context_length",
})  # fmt: skip
"""Fields that change neither logits nor states."""
_THETAS = ("rope_theta", "rope_local_base_freq")
_ROPE = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_SCALINGS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
"""The fields of each scaling. All of them must be given."""
_OPTIONAL = {"yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})}
"""Fields of a scaling that can be absent."""
_PARTLY_ROTATED = ("glm4_moe", *HYBRIDS)
_SCALINGS_OF = {"phi3": ("default",)}
"""The scalings that a family knows, if not all of them; Phi-3 takes YaRN for LongRoPE."""
_AROUND = frozenset({
    "architectures", "model_type", "text_config", "vision_config", "tie_word_embeddings", "image_token_id",
    "video_token_id", "vision_start_token_id", "vision_end_token_id",
})  # fmt: skip
"""Fields around the section of a text: of pictures, and those that say the same of both."""


def read_fields(family: str) -> frozenset[str]:
    """Return the fields of config.json that the layers of a family read."""
    return frozenset({*_required(family), *_READ, *_ALSO_READ[family]})


def _required(family: str) -> tuple[str, ...]:
    dense = () if family in _ONLY_MIXTURES else ("intermediate_size",)
    return (*_REQUIRED, *dense, *_ALSO_REQUIRED[family])


def unserved(store: TensorStore) -> str | None:
    """Return why this library's layers do not compute the model in a folder, or None if they do."""
    names = store.architectures
    family = TARGETS.get(names[0]) if len(names) == 1 else None
    try:
        section = TextSection.of(store)
    except CheckpointError as error:
        return str(error)
    fields = section.fields.values
    if family is None or fields.get("model_type") != family:
        said = f"architectures {fields.get('architectures')!r:.80} and model_type {fields.get('model_type')!r:.40}"
        return f"config.json has {said}, which our layers do not know"
    pictures = names[0] in WITH_PICTURES
    if pictures and (why := _unserved_around(store.config.values, fields, family)):
        return why
    if missing := [name for name in _required(family) if name not in fields]:
        return f"config.json has no {missing[0]}, whose default only transformers knows"
    narrow = family == "gpt_oss" and is_mxfp4(fields)
    read, fixed = read_fields(family), _FIXED | _ALSO_FIXED.get(family, {})
    for name, value in fields.items():
        if name in read or name in _NO_EFFECT or (name == FIELD and (narrow or value is None)):
            continue
        if name not in fixed:
            return f"config.json has {name:.80}, which our layers do not know"
        if value is not None and value != fixed[name]:
            return f"{name} in config.json is {value!r:.80}, and our layers compute {fixed[name]!r} only"
    tensors = _tensors(section.prefix, narrow=narrow, hybrid=family in HYBRIDS, pictures=pictures)
    if others := sorted(name for name in store.names() if not tensors.fullmatch(name)):
        return f"the weights have {others[0]:.80}, which our layers do not know"
    return _unserved_rope(store, family) or _unserved_experts(family, fields)


def _tensors(prefix: str, *, narrow: bool, hybrid: bool, pictures: bool) -> re.Pattern[str]:
    """Match the names of a model's tensors, those of its language model under prefix. transformers leaves others out if
    no part of the model reads them, such as a cache's scales.

    narrow: its experts are in MXFP4. hybrid: it has states, and a layer that drafts. pictures: it reads them.
    """
    inside = re.escape(prefix)
    layer = rf"{inside}layers\.\d+\."
    names = [
        r"lm_head\.weight",
        rf"{inside}(embed_tokens|norm)\.weight",
        rf"{layer}.*(weight|bias|inv_freq|gate_up_proj|down_proj|sinks)",
    ]
    if narrow:
        names.append(rf"{layer}mlp\.experts\.(gate_up|down)_proj_(blocks|scales)")
    if hybrid:
        names += [rf"{layer}linear_attn\.A_log", r"mtp\..+"]
    if pictures:
        names.append(r"model\.visual\..+")
    return re.compile("|".join(names))


def _unserved_around(fields: Mapping[str, Any], text: Mapping[str, Any], family: str) -> str | None:
    """Return what fields around the text's section ask for that our layers do not compute."""
    if fields.get("model_type") != family.removesuffix("_text"):
        return f"config.json has model_type {fields.get('model_type')!r:.40} around a text_config of {family}"
    quantised = {FIELD} if fields.get(FIELD) is None else set[str]()
    if unknown := sorted(fields.keys() - _AROUND - _NO_EFFECT - quantised):
        return f"config.json has {unknown[0]:.80} beside its text_config, which our layers do not know"
    tied = [section.get("tie_word_embeddings", False) for section in (fields, text)]
    return "config.json and its text_config differ in tie_word_embeddings" if tied[0] != tied[1] else None


def _unserved_rope(store: TensorStore, family: str) -> str | None:
    fields, part = TextSection.of(store).fields, "partial_rotary_factor"
    if family in _PARTLY_ROTATED and part in fields.values and fields.values[part] is None:
        return f"config.json has null as {part}, which is no default to transformers"
    if all(fields.values.get(name) for name in ("rope_parameters", "rope_scaling")):
        return "config.json has both rope_parameters and rope_scaling"
    if not has_layer_ropes(family):
        sections = [rope_section(fields).values]
    else:
        try:
            sections = [section.values for section in read_layer_ropes(fields, family)]
        except CheckpointError as error:
            return str(error)
    theta = {name: value for name, value in fields.values.items() if name in _THETAS}
    return next(filter(None, (_unserved_section(family, section, theta) for section in sections)), None)


def _unserved_section(family: str, section: Mapping[str, Any], theta: Mapping[str, Any]) -> str | None:
    kind = section.get("rope_type", section.get("type")) or "default"
    known = _SCALINGS_OF.get(family, tuple(_SCALINGS))
    if not isinstance(kind, str) or kind not in known:
        return f"config.json has a rotary embedding of type {kind!r:.40}, and our layers know {', '.join(known)}"
    optional = _OPTIONAL.get(kind, frozenset())
    if has_layer_ropes(family):
        # transformers looks for it beside the sections of these families.
        optional -= {"truncate"}
    known_keys = _ROPE | _SCALINGS[kind] | optional
    parts = section.get("mrope_section", [0, 0, 0])
    if family in HYBRIDS and isinstance(parts, list) and len(parts) == 3 and all(type(each) is int for each in parts):
        # Which side of a picture an angle counts along: in a text, all count tokens.
        known_keys |= {"mrope_section", "mrope_interleaved"}
    if unknown := sorted(section.keys() - known_keys):
        return f"config.json's rotary embedding of type {kind} has {unknown[0]:.80}, which our layers do not know"
    if nulls := sorted(name for name, value in (*section.items(), *theta.items()) if value is None):
        return f"config.json's rotary embedding has null as {nulls[0]}"
    if family == "gpt_oss" and not (section and (theta or "rope_theta" in section)):
        return "config.json has no rotary embedding with a rope_theta, whose defaults only transformers knows"
    if missing := sorted(_SCALINGS[kind] - section.keys()):
        return f"config.json's rotary embedding of type {kind} has no {missing[0]}"
    if family not in _PARTLY_ROTATED and (part := section.get("partial_rotary_factor")) not in (None, 1.0):
        return f"partial_rotary_factor in config.json is {part!r:.80}, and our layers rotate whole heads only"
    return None


def _unserved_experts(family: str, fields: Mapping[str, Any]) -> str | None:
    if family in ("qwen3_moe", "gpt_oss") and ("num_experts" in fields) == ("num_local_experts" in fields):
        return "config.json must have one of num_experts and num_local_experts for our layers"
    return None
