"""Published kinds of draft that nothing here computes.

Most have the tensors of a kind that is served, and more: each is known by its name before it is taken for that one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spec_decode.models.checkpoints.store import TensorStore


@dataclass(frozen=True, kw_only=True, slots=True)
class UnservedKind:
    """A kind, and what tells it: any of these.

    name           what to call it, and what it has beyond the kinds that are served
    architectures  in config.json
    type           speculators_model_type in config.json
    projector      projector_type in config.json or its dflash_config
    tensors        a pattern that the beginning of a tensor's name matches
    """

    name: str
    architectures: tuple[str, ...] = ()
    type: str | None = None
    projector: str | None = None
    tensors: str | None = None

    def evidence(self, store: TensorStore) -> str | None:
        """What tells that the checkpoint is of this kind; None where it is not."""
        config = store.config
        if self.type is not None and config.values.get("speculators_model_type") == self.type:
            return f"speculators_model_type {self.type!r}"
        if named := [name for name in store.architectures if name in self.architectures]:
            return f"architectures {named}"
        for section in (config, config.section("dflash_config")):
            if self.projector is not None and section.values.get("projector_type") == self.projector:
                return f"projector_type {self.projector!r}"
        names = sorted(store.names()) if self.tensors is not None else []
        found = next((name for name in names if re.match(self.tensors or "", name)), None)
        return None if found is None else f"a tensor {found}"


_KINDS = (
    UnservedKind(
        name="XPress, DFlash with a head that refines a block in several passes",
        architectures=("Qwen3XPressModel", "DFlashQwen3XPressModel", "XPressDraftModel"),
        type="xpress",
        tensors=r"(model\.)?(xpress_head|refiner_head)\.",
    ),
    UnservedKind(
        name="LiLiCorr, DFlash with attention over the candidates of a block",
        architectures=("LiLiCorrDraftModel",),
        tensors=r"(model\.)?lilicorr\.",
    ),
    UnservedKind(
        name="Domino, DFlash with a recurrent head",
        projector="domino",
        tensors=r"(model\.)?(prefix_gru|embed_proj)\.",
    ),
    UnservedKind(
        name="DeepSeek-V4's DSpark, blocks of mtp layers with a Markov head",
        tensors=r"mtp\.\d+\.markov_head\.",
    ),
    UnservedKind(
        name="multi-token prediction over tokens that an indexer chooses, as in GLM-5 and DeepSeek-V3.2",
        tensors=r"model\.layers\.\d+\.self_attn\.indexer\.",
    ),
    UnservedKind(
        name="Qwen's multi-token prediction over hyper-connections",
        tensors=r"mtp\.hyper_connection_mixer\.",
    ),
    UnservedKind(
        name="MiMo-V2's multi-token prediction, in windows with sinks and values narrower than keys",
        tensors=r"model\.mtp\.layers\.\d+\.",
    ),
)


def name_unserved(store: TensorStore) -> str | None:
    """The kind of a checkpoint that no model here computes, and what tells it; None for any other checkpoint."""
    for kind in _KINDS:
        if (evidence := kind.evidence(store)) is not None:
            return f"{kind.name} ({evidence})"
    return None
