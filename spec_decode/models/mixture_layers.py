"""The layers of targets with a mixture of experts or with states: Qwen3-MoE, GLM-4.5 and Qwen3-Next, in which some
layers can have a dense feed-forward, GPT-OSS and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights
from spec_decode.models.config import ModelConfig
from spec_decode.models.decoder_config import DecoderConfig
from spec_decode.models.layer_windows import HYBRIDS
from spec_decode.models.layers.delta_net import DeltaNet
from spec_decode.models.layers.feed_forward import LLAMA_NAMES, FeedForward, read_dense
from spec_decode.models.layers.gpt_oss_mixture import read_gpt_oss_mixture
from spec_decode.models.layers.grouped_attention import GroupedAttention, GroupedShape
from spec_decode.models.layers.moe import (
    MixtureOfExperts,
    read_deepseek_feed_forward,
    read_qwen_mixture,
    read_shared_qwen_mixture,
)
from spec_decode.models.layers.pre_norm_layer import PreNormLayer
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RopeConfig
from spec_decode.models.text_section import TextSection


def read_mixture_layer(config: DecoderConfig, weights: ScopedWeights, layer: int, family: str) -> PreNormLayer:
    """Read one layer, with its weights. Raises CheckpointError."""
    fields, prefix = TextSection.of(weights.store)
    block = weights.under(f"{prefix}layers.{layer}.")
    model = replace(config.model, sliding_window=config.windows[layer])
    attention: GroupedAttention | DeltaNet
    if (states := config.recurrent) is not None and layer in states.layers:
        sizes, by_head = (states.spec, model.hidden_size, model.norm_eps), family == "qwen3_next"
        attention = DeltaNet(*sizes, block.under("linear_attn."), by_head=by_head)
    else:
        attention = GroupedAttention(_shape(config, model, fields, family), block.under("self_attn."))
    return PreNormLayer(
        layer,
        _norm(block, "input_layernorm.weight", model),
        attention,
        _norm(block, "post_attention_layernorm.weight", model),
        FAMILIES[family](fields, block.under("mlp."), layer),
    )


def _norm(weights: ScopedWeights, name: str, model: ModelConfig) -> RMSNorm:
    return RMSNorm.read(weights, name, model.hidden_size, model.norm_eps, model.norm_offset)


def _shape(config: DecoderConfig, model: ModelConfig, fields: ConfigReader, family: str) -> GroupedShape:
    hybrid = family in HYBRIDS
    biased = fields.get("attention_bias", bool, family == "gpt_oss")
    return GroupedShape(
        model=model,
        rope=RopeConfig(dims=model.rotary_dim, theta=model.rope_theta, scaling=config.scaling),
        qk_norm=fields.get("use_qk_norm", bool, hybrid or family == "qwen3_moe"),
        gated=hybrid,
        norm_offset=model.norm_offset,
        qkv_bias=biased,
        out_bias=biased and (hybrid or family == "gpt_oss"),
    )


def _read_qwen(
    fields: ConfigReader,
    weights: ScopedWeights,
    layer: int,
    read: Callable[[ConfigReader, ScopedWeights], MixtureOfExperts] = read_qwen_mixture,
) -> FeedForward | MixtureOfExperts:
    step, dense = fields.get("decoder_sparse_step", int, 1), fields.get("mlp_only_layers", list, [])
    if step < 1:
        raise CheckpointError(f"decoder_sparse_step in {fields.place} must be 1 or more, got {step}. Restore the file.")
    return _read_dense(fields, weights, layer) if layer in dense or (layer + 1) % step else read(fields, weights)


def _read_dense(fields: ConfigReader, weights: ScopedWeights, _: int) -> FeedForward:
    hidden, intermediate = fields.get("hidden_size", int), fields.get("intermediate_size", int)
    return read_dense(weights, LLAMA_NAMES, hidden, intermediate, None)


FAMILIES: dict[str, Callable[[ConfigReader, ScopedWeights, int], FeedForward | MixtureOfExperts]] = {
    "qwen3_moe": _read_qwen,
    "glm4_moe": read_deepseek_feed_forward,
    "gpt_oss": read_gpt_oss_mixture,
    "qwen3_next": partial(_read_qwen, read=read_shared_qwen_mixture),
    "qwen3_5_text": _read_dense,
    "qwen3_5_moe_text": lambda fields, weights, _: read_shared_qwen_mixture(fields, weights),
}
"""How each family reads the feed-forward of a layer, under its prefix."""
