"""The layers of targets with a mixture of experts: Qwen3-MoE and GLM-4.5, in which some layers can have a dense
feed-forward, and GPT-OSS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights
from spec_decode.models.decoder_config import DecoderConfig
from spec_decode.models.layers.feed_forward import LLAMA_NAMES, FeedForward, read_dense
from spec_decode.models.layers.gpt_oss_mixture import read_gpt_oss_mixture
from spec_decode.models.layers.grouped_attention import GroupedAttention, GroupedShape
from spec_decode.models.layers.moe import MixtureOfExperts, read_deepseek_feed_forward, read_qwen_mixture
from spec_decode.models.layers.pre_norm_layer import PreNormLayer
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import RopeConfig


def read_mixture_layer(config: DecoderConfig, weights: ScopedWeights, layer: int, family: str) -> PreNormLayer:
    """Read one layer, with its weights. Raises CheckpointError."""
    fields, block = weights.store.config, weights.under(f"model.layers.{layer}.")
    model = replace(config.model, sliding_window=config.windows[layer])
    biased = fields.get("attention_bias", bool, family == "gpt_oss")
    shape = GroupedShape(
        model=model,
        rope=RopeConfig(dims=model.rotary_dim, theta=model.rope_theta, scaling=config.scaling),
        qk_norm=fields.get("use_qk_norm", bool, family == "qwen3_moe"),
        gated=False,
        norm_offset=0.0,
        qkv_bias=biased,
        out_bias=biased and family == "gpt_oss",
    )
    return PreNormLayer(
        layer,
        RMSNorm.read(block, "input_layernorm.weight", model.hidden_size, model.norm_eps),
        GroupedAttention(shape, block.under("self_attn.")),
        RMSNorm.read(block, "post_attention_layernorm.weight", model.hidden_size, model.norm_eps),
        FAMILIES[family](fields, block.under("mlp."), layer),
    )


def _read_qwen(fields: ConfigReader, weights: ScopedWeights, layer: int) -> FeedForward | MixtureOfExperts:
    step, dense = fields.get("decoder_sparse_step", int, 1), fields.get("mlp_only_layers", list, [])
    if step < 1:
        raise CheckpointError(f"decoder_sparse_step in {fields.place} must be 1 or more, got {step}. Restore the file.")
    if layer in dense or (layer + 1) % step:
        hidden, intermediate = fields.get("hidden_size", int), fields.get("intermediate_size", int)
        return read_dense(weights, LLAMA_NAMES, hidden, intermediate, None)
    return read_qwen_mixture(fields, weights)


FAMILIES: dict[str, Callable[[ConfigReader, ScopedWeights, int], FeedForward | MixtureOfExperts]] = {
    "qwen3_moe": _read_qwen,
    "glm4_moe": read_deepseek_feed_forward,
    "gpt_oss": read_gpt_oss_mixture,
}
"""How each family reads the feed-forward of a layer, under its prefix."""
