"""Multi-token prediction with one key and one value per KV head, in the layouts of four publishers.

Qwen (3-Next, 3.5, 3.6, 3.8), MiMo and GLM-4.5 ship the layer in their target's checkpoint; `speculators` trains and
saves it separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.models import mtp
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, TensorStore, frozen
from spec_decode.models.draft import check_shared, check_target, decoder_fields
from spec_decode.models.layer_windows import read_windows
from spec_decode.models.layers.feed_forward import FeedForward, Names, read_dense
from spec_decode.models.layers.grouped_attention import GroupedAttention, read_grouped_shape
from spec_decode.models.layers.moe import MixtureOfExperts, read_qwen_mixture
from spec_decode.models.layers.rms_norm import RMSNorm
from spec_decode.models.mtp_draft import MtpModules, PredictionLayer

_QWEN_ARCHITECTURES = tuple(
    f"{name}{end}" for name in ("Qwen3_5", "Qwen3_5Moe") for end in ("ForCausalLM", "ForConditionalGeneration")
)
_NAMES = Names(gate="gate_proj", up="up_proj", down="down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayout:
    """A publisher's names of the layer's parts, and how its attention differs.

    prefix       of all tensors; {layer} stands for the number of the target's layers
    norms        of the embedding and of the state
    fuse         the projection of both
    final_norm   of the state that the layer returns, which the head reads
    block        prefix of the decoder layer
    count        the field with the number of such layers
    state_first  whether the state precedes the embedding in the columns of `fuse`
    qk_norm      whether each query and key head is normed; None: config.json says
    gated        whether the attention's output is gated, with one gate for each query dim
    norm_offset  of all norms: see RMSNorm.read
    rotated      fraction of a head that is rotated, if config.json does not say
    """

    prefix: str
    norms: tuple[str, str]
    fuse: str
    final_norm: str
    block: str = ""
    count: str = "num_nextn_predict_layers"
    state_first: bool = False
    qk_norm: bool | None = True
    gated: bool = False
    norm_offset: float = 0.0
    rotated: float = 1.0


_QWEN = MtpLayout(
    prefix="mtp.",
    norms=("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"),
    fuse="fc.weight",
    final_norm="norm.weight",
    block="layers.0.",
    count="mtp_num_hidden_layers",
    gated=True,
    norm_offset=1.0,
    rotated=0.25,
)
_GLM = MtpLayout(
    prefix="model.layers.{layer}.",
    norms=("enorm.weight", "hnorm.weight"),
    fuse="eh_proj.weight",
    final_norm="shared_head.norm.weight",
    qk_norm=None,
    rotated=0.5,
)
_SPECULATORS = MtpLayout(
    prefix="mtp_layers.0.",
    norms=("token_layernorm.weight", "hidden_layernorm.weight"),
    fuse="input_proj.weight",
    final_norm="final_layernorm.weight",
)
_SPECULATORS_OF_QWEN = replace(_SPECULATORS, gated=True, norm_offset=1.0, rotated=0.25)
_MIMO = replace(_SPECULATORS, prefix="model.mtp_layers.0.", state_first=True, qk_norm=False)

_LAYOUTS = {
    **dict.fromkeys((*_QWEN_ARCHITECTURES, "Qwen3NextForCausalLM"), _QWEN),
    "Glm4MoeForCausalLM": _GLM,
    "MiMoForCausalLM": _MIMO,
}
"""Keyed by the architecture of the target that ships the layer."""
_MODEL_TYPES = {
    "qwen3": _SPECULATORS,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _SPECULATORS_OF_QWEN),
}
"""Keyed by the model_type of the layer that speculators trained."""
ARCHITECTURES = (*_LAYOUTS, "MTPDraftModel")


def serves(store: TensorStore) -> bool:
    """Whether config.json names one of the architectures."""
    return _is_by_speculators(store) or any(name in _LAYOUTS for name in store.architectures)


def load(store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device) -> DraftModel:
    """Load the draft from a target's checkpoint, or from one that holds nothing else.

    A single such layer drafts at every step (GroupedPrediction); of several, which only GLM publishes, each drafts one
    token (MtpModules). A layer without its own embedding or head shares the target's `embed.weight` and `logits`.
    Raises CheckpointError for any problem.
    """
    config, layout = _read_layout(store)
    config.require("hidden_act", "silu")
    _require_no_window(config, layout)
    first = 0
    if layout is _GLM:
        first = config.get("num_hidden_layers", int)
        count = mtp.count_modules(store, first)
    else:
        count = _read_count(store, config, layout)
    modules = []
    for module in range(count):
        weights = ScopedWeights(store, layout.prefix.format(layer=first + module), dtype, device)
        modules.append(GroupedPrediction(weights, target, config, layout, module))
        weights.refuse_unused()
    return modules[0] if len(modules) == 1 else MtpModules(modules)


def _is_by_speculators(store: TensorStore) -> bool:
    """Whether speculators saved the layer, without a target."""
    return store.config.values.get("speculators_model_type") == "mtp" or "MTPDraftModel" in store.architectures


def _read_layout(store: TensorStore) -> tuple[ConfigReader, MtpLayout]:
    """Return the section of config.json that describes the layer, and its layout. Raises CheckpointError."""
    if not _is_by_speculators(store):
        layout = next(_LAYOUTS[name] for name in store.architectures if name in _LAYOUTS)
        nested = isinstance(store.config.values.get("text_config"), dict)
        return store.config.section("text_config") if nested else store.config, layout
    config = decoder_fields(store)
    kind = config.get("model_type", str)
    if kind not in _MODEL_TYPES:
        raise CheckpointError(
            f"model_type in {config.place} must be one of {', '.join(_MODEL_TYPES)}, got {kind!r}. "
            "Use a draft trained for one of those."
        )
    return config, _MODEL_TYPES[kind]


def _require_no_window(config: ConfigReader, layout: MtpLayout) -> None:
    """Raise CheckpointError for a window in the layers of families that can have one: Qwen3, and MiMo after Qwen2."""
    if layout not in (_SPECULATORS, _MIMO):
        return
    if any(read_windows(config, config.get("num_hidden_layers", int), family="qwen3")):
        raise CheckpointError(
            f"use_sliding_window in {config.place} must be false: a window in a layer of multi-token prediction is not "
            "supported. Use a checkpoint without one."
        )


def _read_count(store: TensorStore, config: ConfigReader, layout: MtpLayout) -> int:
    """Return 1, the number of draft layers. Raises CheckpointError if config.json has another number; Qwen3-Next's has
    none."""
    section = store.config if _is_by_speculators(store) else config
    if (count := section.get(layout.count, int, 1)) != 1:
        raise CheckpointError(
            f"{layout.count} in {section.place} must be 1, got {count}: one layer, {layout.prefix}*, drafts every "
            "step. Use a checkpoint with one."
        )
    return count


class GroupedPrediction(PredictionLayer):
    """A PredictionLayer with attention over grouped heads."""

    def __init__(
        self, weights: ScopedWeights, target: TargetModel, config: ConfigReader, layout: MtpLayout, layer: int
    ) -> None:
        """config: the section that describes the layer. layer: its index among the draft's layers."""
        hidden, eps, offset = config.get("hidden_size", int), config.positive("rms_norm_eps"), layout.norm_offset
        # Read for every layout, so that a malformed value is refused.
        use_qk_norm = config.get("use_qk_norm", bool, False)
        qk_norm = use_qk_norm if layout.qk_norm is None else layout.qk_norm
        attention = read_grouped_shape(
            config, eps, qk_norm=qk_norm, gated=layout.gated, norm_offset=offset, rotated=layout.rotated
        )
        check_shared(weights.store.folder, "vocab_size", config.get("vocab_size", int), target.vocab_size)
        check_target(weights.store, target, hidden)
        super().__init__(
            weights,
            target,
            embedding="embed_tokens.weight",
            head="shared_head.head.weight",
            norms=layout.norms,
            norm_offset=offset,
            config=config,
        )
        self.layer = layer
        fuse, block = weights.take(layout.fuse, hidden, 2 * hidden), weights.under(layout.block)
        self.fuse = frozen(fuse.roll(hidden, 1) if layout.state_first else fuse)
        self.attention_norm = RMSNorm.read(block, "input_layernorm.weight", hidden, eps, offset)
        self.attention = GroupedAttention(attention, block.under("self_attn."), self.max_positions)
        self.mlp_norm = RMSNorm.read(block, "post_attention_layernorm.weight", hidden, eps, offset)
        self.mlp = _read_feed_forward(config, block.under("mlp."), layout, layer)
        self.final_norm = RMSNorm.read(weights, layout.final_norm, hidden, eps, offset)


def _read_feed_forward(
    config: ConfigReader, weights: ScopedWeights, layout: MtpLayout, layer: int
) -> FeedForward | MixtureOfExperts:
    hidden = config.get("hidden_size", int)
    if layout is _GLM:
        return mtp.read_feed_forward(config, weights, config.get("num_hidden_layers", int) + layer, hidden)
    if config.optional("num_experts", int):
        return read_qwen_mixture(config, weights, _NAMES)
    return read_dense(weights, _NAMES, hidden, config.get("intermediate_size", int), None)
