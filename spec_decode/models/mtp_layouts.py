"""How publishers name and arrange a layer of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

_QWEN_ARCHITECTURES = tuple(
    f"{name}{end}" for name in ("Qwen3_5", "Qwen3_5Moe") for end in ("ForCausalLM", "ForConditionalGeneration")
)


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
    latent       whether the layer attends over latents, as DeepSeek-V3's does
    windowed     whether config.json can ask for a window
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
    latent: bool = False
    windowed: bool = False

    @property
    def numbered(self) -> bool:
        """Whether the layers, of which there can be several, have the numbers after the target's."""
        return "{layer}" in self.prefix


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
_DEEPSEEK = MtpLayout(
    prefix="model.layers.{layer}.",
    norms=("enorm.weight", "hnorm.weight"),
    fuse="eh_proj.weight",
    final_norm="shared_head.norm.weight",
    latent=True,
)
_GLM = replace(_DEEPSEEK, qk_norm=None, rotated=0.5, latent=False)
_SPECULATORS = MtpLayout(
    prefix="mtp_layers.0.",
    norms=("token_layernorm.weight", "hidden_layernorm.weight"),
    fuse="input_proj.weight",
    final_norm="final_layernorm.weight",
    windowed=True,
)
_SPECULATORS_OF_QWEN = replace(_SPECULATORS, gated=True, norm_offset=1.0, rotated=0.25, windowed=False)
_MIMO = replace(_SPECULATORS, prefix="model.mtp_layers.0.", state_first=True, qk_norm=False)

LAYOUTS = {
    **dict.fromkeys((*_QWEN_ARCHITECTURES, "Qwen3NextForCausalLM"), _QWEN),
    **dict.fromkeys(("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"), _DEEPSEEK),
    "Glm4MoeForCausalLM": _GLM,
    "MiMoForCausalLM": _MIMO,
}
"""Keyed by the architecture of the target that ships the layer."""
MODEL_TYPES = {
    "qwen3": _SPECULATORS,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _SPECULATORS_OF_QWEN),
}
"""Keyed by the model_type of the layer that speculators trained."""
