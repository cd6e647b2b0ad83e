"""Read the config.json of a causal language model: what its family adds to Llama's decoder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from spec_decode.model_api import LayerGroup
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.config import ModelConfig
from spec_decode.models.decoder_config import DecoderConfig, read_decoder
from spec_decode.models.layer_ropes import has_layer_ropes, read_layer_ropes
from spec_decode.models.layer_windows import HYBRIDS, no_windows, read_recurrent_layers, read_windows
from spec_decode.models.layers.delta_net import read_state_spec
from spec_decode.models.layers.rope import LLAMA_SCALINGS, RopeConfig, read_rope
from spec_decode.models.text_section import TARGETS, TextSection


def family_of(store: TensorStore) -> str:
    """Return the family of a checkpoint whose config.json names one of TARGETS."""
    (architecture,) = store.architectures
    return TARGETS[architecture]


def read_causal_config(store: TensorStore, dtype: torch.dtype) -> DecoderConfig:
    """Read the decoder of a family, for weights of this dtype. Raises CheckpointError."""
    family, fields, window = family_of(store), store.config, None
    if family in HYBRIDS:
        return _hybrid(TextSection.of(store).fields)
    if has_layer_ropes(family):
        full, sliding = read_layer_ropes(fields, family)
        fields = ConfigReader({**fields.values, "rope_parameters": full.values}, fields.place)
        window = read_rope(sliding, LLAMA_SCALINGS)
    rotated = 0.5 if family == "glm4_moe" else None
    decoder = read_decoder(fields, partial(read_windows, family=family), rotated=rotated)
    decoder = replace(decoder, model=_scaled(decoder.model, family, fields, dtype))
    if window is None:
        return decoder
    theta, scaling = window
    return replace(decoder, window_rope=RopeConfig(dims=decoder.model.rotary_dim, theta=theta, scaling=scaling))


def _hybrid(fields: ConfigReader) -> DecoderConfig:
    # A mixture in every layer has no dense size.
    sizes = ConfigReader(
        {"intermediate_size": fields.values.get("moe_intermediate_size"), **fields.values}, fields.place
    )
    decoder = read_decoder(sizes, no_windows, rotated=0.25)
    layers = read_recurrent_layers(fields, decoder.model.num_layers)
    group = LayerGroup(name="state", spec=read_state_spec(fields), layers=layers) if layers else None
    return replace(decoder, model=replace(decoder.model, norm_offset=1.0), recurrent=group)


def _scaled(model: ModelConfig, family: str, fields: ConfigReader, dtype: torch.dtype) -> ModelConfig:
    """Return the model with the factors and offsets of its family."""
    if family == "gemma3_text":
        fields.require("hidden_activation", "gelu_pytorch_tanh")
        capped = fields.values.get("final_logit_softcapping") is not None
        return replace(
            model,
            logits_cap=fields.positive("final_logit_softcapping") if capped else None,
            norm_offset=1.0,
            softmax_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
            # The factor is rounded to the weights' dtype: in bf16, sqrt(3072) is 55.5.
            embedding_scale=float(torch.tensor(model.hidden_size**0.5).to(dtype)),
        )
    if family == "granite":
        return _granite(model, fields)
    return replace(model, sinks=family == "gpt_oss")


def _granite(model: ModelConfig, fields: ConfigReader) -> ModelConfig:
    """Return the model whose states are Granite's, divided by residual_multiplier m: with x = m y, the layer
    x + m f(norm(x)) is y + f(norm(y)), and a norm of y adds eps / m^2 to the mean square. So no layer multiplies."""
    residual = fields.positive("residual_multiplier", 1.0)
    try:
        return replace(
            model,
            softmax_scale=fields.positive("attention_multiplier", 1.0),
            embedding_scale=fields.positive("embedding_multiplier", 1.0) / residual,
            state_scale=residual,
            norm_eps=model.norm_eps / residual**2,
            logits_divisor=fields.positive("logits_scaling", 1.0),
        )
    except (ValueError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"invalid multipliers in {fields.place}: {error}. Restore the file.") from error
