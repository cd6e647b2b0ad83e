"""Multi-token prediction (arXiv:2412.19437, section 2.2): a decoder layer trained together with its target, in the
layouts of five publishers.

DeepSeek-V3, GLM-4.5, GLM-4.7-Flash, Qwen (3-Next, 3.5, 3.6, 3.8) and MiMo ship the layer in their target's checkpoint;
`speculators` trains and saves it separately.
"""

from __future__ import annotations

from itertools import count

import torch

from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore, frozen
from spec_decode.models.draft import check_shared, check_target, decoder_fields, read_embedding
from spec_decode.models.layer_windows import read_windows
from spec_decode.models.layers.feed_forward import LLAMA_NAMES, FeedForward, read_dense
from spec_decode.models.layers.fuse import NormedProjection
from spec_decode.models.layers.grouped_attention import GroupedAttention, read_grouped_shape
from spec_decode.models.layers.linear import Linear
from spec_decode.models.layers.mla_attention import MlaAttention, read_mla_shape
from spec_decode.models.layers.moe import (
    MixtureOfExperts,
    read_deepseek_feed_forward,
    read_shared_qwen_mixture,
)
from spec_decode.models.layers.pre_norm_layer import PreNormLayer
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.layers.rope import Rotary
from spec_decode.models.mtp_layouts import LAYOUTS, MODEL_TYPES, MtpLayout
from spec_decode.models.mtp_modules import MtpModules
from spec_decode.models.recurrent_draft import OneLayer, RecurrentDraft
from spec_decode.models.target_head import TargetHead

ARCHITECTURES = (*LAYOUTS, "MTPDraftModel")


def serves(store: TensorStore) -> bool:
    """Whether config.json names one of the architectures, unless it has no such layer and describes a model that can
    draft as it is."""
    no_layer = not store.config.values.get("num_nextn_predict_layers")
    if _is_glm(store) and no_layer and not any(name.endswith("eh_proj.weight") for name in store.names()):
        return False
    return _is_by_speculators(store) or any(name in LAYOUTS for name in store.architectures)


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DraftModel:
    """Load the draft from a target's checkpoint, or from one that holds nothing else.

    A single such layer drafts at every step (RecurrentDraft); of several, which only DeepSeek and GLM publish, each
    drafts one token (MtpModules). A layer without its own embedding or head shares the target's `embed.weight` and
    `logits`. Raises CheckpointError for any problem.
    """
    config, layout = _read_layout(store)
    config.require("hidden_act", "silu")
    if layout.latent:
        config.require("attention_bias", False)
    _require_no_window(config, layout)
    first, modules = config.get("num_hidden_layers", int) if layout.numbered else 0, []
    for module in range(_read_count(store, config, layout)):
        weights = ScopedWeights(store, layout.prefix.format(layer=first + module), dtype, device)
        modules.append(_read_module(weights, target, config, layout, module))
        weights.refuse_unused()
    return modules[0] if len(modules) == 1 else MtpModules(modules)


def require_draft_layers(config: ConfigReader) -> int:
    """Return the number of draft layers in a checkpoint. Raises CheckpointError if there are none."""
    if (expected := config.get("num_nextn_predict_layers", int, 0)) < 1:
        raise CheckpointError(
            f"num_nextn_predict_layers in {config.place} must be at least 1, got "
            f"{config.values.get('num_nextn_predict_layers')}; the checkpoint has no draft layer. "
            "Use one that has."
        )
    return expected


def read_head(weights: ScopedWeights, target: TargetModel, name: str, hidden: int) -> Linear | TargetHead:
    """Read the layer's own head; return the target's if the checkpoint has none. Raises CheckpointError."""
    return Linear.of(weights.parameter(name, target.vocab_size, hidden)) if weights.has(name) else TargetHead(target)


def _is_glm(store: TensorStore) -> bool:
    """Whether the target that ships the layer is of a family that can draft as it is."""
    return store.architectures == ["Glm4MoeForCausalLM"]


def _is_by_speculators(store: TensorStore) -> bool:
    """Whether speculators saved the layer, without a target."""
    return store.config.values.get("speculators_model_type") == "mtp" or "MTPDraftModel" in store.architectures


def _read_layout(store: TensorStore) -> tuple[ConfigReader, MtpLayout]:
    """Return the section of config.json that describes the layer, and its layout. Raises CheckpointError."""
    if not _is_by_speculators(store):
        layout = next(LAYOUTS[name] for name in store.architectures if name in LAYOUTS)
        nested = isinstance(store.config.values.get("text_config"), dict)
        return store.config.section("text_config") if nested else store.config, layout
    config = decoder_fields(store)
    kind = config.get("model_type", str)
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"model_type in {config.place} must be one of {', '.join(MODEL_TYPES)}, got {kind!r}. "
            "Use a draft trained for one of those."
        )
    return config, MODEL_TYPES[kind]


def _require_no_window(config: ConfigReader, layout: MtpLayout) -> None:
    """Raise CheckpointError if config.json asks for a window."""
    if layout.windowed and any(read_windows(config, config.get("num_hidden_layers", int), family="qwen3")):
        raise CheckpointError(
            f"use_sliding_window in {config.place} must be false: a window in a layer of multi-token prediction is not "
            "supported. Use a checkpoint without one."
        )


def _read_count(store: TensorStore, config: ConfigReader, layout: MtpLayout) -> int:
    """Return the number of draft layers. Raises CheckpointError unless it is 1, or that of the layers from the target's
    last on that the checkpoint holds. Qwen3-Next's config.json has none."""
    if layout.numbered:
        return _count_modules(store, config.get("num_hidden_layers", int))
    section = store.config if _is_by_speculators(store) else config
    if (found := section.get(layout.count, int, 1)) != 1:
        raise CheckpointError(
            f"{layout.count} in {section.place} must be 1, got {found}: one layer, {layout.prefix}*, drafts every "
            "step. Use a checkpoint with one."
        )
    if not any(name.startswith(layout.prefix) for name in store.names()):
        why = f"{store.folder} has no tensors {layout.prefix}*, the layer that drafts"
        raise CheckpointError(f"{why}. Use a checkpoint with it, or another draft.")
    return found


def _count_modules(store: TensorStore, first: int) -> int:
    """Return the number of draft layers from `first` on. Raises CheckpointError if config.json says otherwise."""
    expected = require_draft_layers(store.config)
    layers = {name.split(".")[2] for name in store.names() if name.startswith("model.layers.")}
    present = next(index for index in count() if str(first + index) not in layers)
    if present != expected:
        raise CheckpointError(
            f"{store.folder} must hold num_nextn_predict_layers draft layers, {expected} from model.layers.{first} on, "
            f"got {present}. Complete the download, or correct config.json"
            f"{': with 0 layers, the whole model drafts' if _is_glm(store) else ''}."
        )
    return expected


def _read_module(
    weights: ScopedWeights, target: TargetModel, config: ConfigReader, layout: MtpLayout, module: int
) -> RecurrentDraft:
    """Read one layer, `module` of a chain. It returns states after its final norm, and reads such states: those of the
    target are normed, too. config: the section that describes the layer."""
    hidden, eps = config.get("hidden_size", int), config.positive("rms_norm_eps")
    offset, block = layout.norm_offset, weights.under(layout.block)
    check_shared(weights.store.folder, "vocab_size", config.get("vocab_size", int), target.vocab_size)
    check_target(weights.store, target, hidden)
    embed = read_embedding(weights, target, "embed_tokens.weight", target.vocab_size, hidden)

    def norm(weights: ScopedWeights, name: str) -> RMSNorm:
        return RMSNorm.read(weights, name, hidden, eps, offset)

    embedding_norm, state_norm = (norm(weights, name) for name in layout.norms)
    project = weights.take(layout.fuse, hidden, 2 * hidden)
    if layout.state_first:
        project = project.roll(hidden, 1)
    attention_norm = norm(block, "input_layernorm.weight")
    attention, rotary = _read_attention(config, block.under("self_attn."), layout, eps)
    mlp_norm = norm(block, "post_attention_layernorm.weight")
    mlp = _read_feed_forward(config, block.under("mlp."), layout, module)
    return RecurrentDraft(
        target,
        OneLayer("mtp", attention.shape, module),
        rotary,
        embed,
        fuse=NormedProjection(embedding_norm, state_norm, Linear.of(frozen(project))),
        layers=[PreNormLayer(module, attention_norm, attention, mlp_norm, mlp)],
        norm=norm(weights, layout.final_norm),
        head=read_head(weights, target, "shared_head.head.weight", hidden),
    )


def _read_attention(
    config: ConfigReader, weights: ScopedWeights, layout: MtpLayout, eps: float
) -> tuple[MlaAttention | GroupedAttention, Rotary]:
    positions = config.get("max_position_embeddings", int)
    if layout.latent:
        latent = read_mla_shape(config, config.get("hidden_size", int), eps)
        return MlaAttention(latent, weights), Rotary(latent.rope.table(positions).to(weights.device))
    # Read for every layout, so that a malformed value is refused.
    use_qk_norm = config.get("use_qk_norm", bool, False)
    qk_norm = use_qk_norm if layout.qk_norm is None else layout.qk_norm
    grouped = read_grouped_shape(
        config, eps, qk_norm=qk_norm, gated=layout.gated, norm_offset=layout.norm_offset, rotated=layout.rotated
    )
    table = grouped.rope.table(positions, grouped.model.head_dim)
    return GroupedAttention(grouped, weights), Rotary(table.to(weights.device))


def _read_feed_forward(
    config: ConfigReader, weights: ScopedWeights, layout: MtpLayout, module: int
) -> FeedForward | MixtureOfExperts:
    """Read a mixture or a dense feed-forward. Raises CheckpointError."""
    if layout.numbered:
        return read_deepseek_feed_forward(config, weights, config.get("num_hidden_layers", int) + module)
    if config.optional("num_experts", int):
        return read_shared_qwen_mixture(config, weights)
    hidden, intermediate = config.get("hidden_size", int), config.get("intermediate_size", int)
    return read_dense(weights, LLAMA_NAMES, hidden, intermediate, None)
