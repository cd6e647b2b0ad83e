"""Load a draft of any supported kind from a folder, and reject the kinds that are not supported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.models import (
    causal_lm,
    deepseek_v4,
    dflash,
    dflash2,
    dspark,
    eagle,
    eagle3,
    mtp,
)
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.folder_kind import refuse_quantised
from spec_decode.models.checkpoints.store import TensorStore

_KINDS = {
    "DSpark (markov_head among its tensors)": dspark,
    "DFlash2 (candidate_selector among its tensors)": dflash2,
    "DFlash (fc and hidden_norm among its tensors)": dflash,
    f"EAGLE-3 (d2t or hidden_norm among its tensors, or {', '.join(eagle3.LATENT_ARCHITECTURES)})": eagle3,
    "EAGLE (fc.weight among its tensors)": eagle,
    f"multi-token prediction ({', '.join(mtp.ARCHITECTURES)})": mtp,
    f"DeepSeek-V4's multi-token prediction ({', '.join(deepseek_v4.ARCHITECTURES)})": deepseek_v4,
    f"a causal language model ({', '.join(causal_lm.ARCHITECTURES)})": causal_lm,
}
"""Modules with `serves` and `load`. The first match loads the checkpoint, so order matters: drafts are often published
under their target's architecture."""


def load_draft(
    folder: Path,
    target: TargetModel,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    target_folder: Path | None = None,
) -> DraftModel:
    """Load a published draft for `target`, ready to run.

    The folder holds config.json and weights as safetensors or PyTorch's .bin, sharded or not. An EAGLE draft uses the
    target's `logits`, and the target's `embed` (weight [V, H]) if it has no embedding.

    target_folder: the target's, whose tokenizer is compared with the one in the draft's folder. Equal tokens show that
    vocabularies of two sizes differ in rows of padding only; without both tokenizers, such a draft is rejected.

    Raises CheckpointError for any problem in the folder and for a draft that does not fit the target.
    """
    same = target_folder is not None and check_same_tokens(folder, target_folder)
    return load_with_tokens(folder, target, dtype=dtype, device=torch.device(device), same_tokens=same)


def load_with_tokens(
    folder: Path, target: TargetModel, *, dtype: torch.dtype, device: torch.device, same_tokens: bool
) -> DraftModel:
    """As `load_draft`; same_tokens: the result of `check_same_tokens`."""
    store, kind = _open(folder)
    store.same_tokens = same_tokens
    draft: DraftModel = kind.load(store, target, dtype=dtype, device=device)
    return draft


def check_draft(folder: Path) -> None:
    """Raise CheckpointError for a folder that `load_draft` rejects for every target. Call it before loading the target,
    which can take minutes."""
    _open(folder)


def check_same_tokens(folder: Path, target_folder: Path, tokenizer: Any = None) -> bool:
    """Return whether the tokenizers in a draft's folder and in its target's show that both have the same tokens; False
    if one of the folders has no tokenizer. tokenizer: the target's, if it is loaded.

    A token that only one of them has makes no difference: the draft never proposes it, or the target rejects it.
    Raises CheckpointError if the same token has two ids, or two tokens one.
    """
    from spec_decode.models.hf.folder import has_tokenizer, load_tokenizer

    if not (has_tokenizer(folder) and has_tokenizer(target_folder)):
        return False
    own, ids = load_tokenizer(folder).get_vocab(), (tokenizer or load_tokenizer(target_folder)).get_vocab()
    tokens = {token_id: token for token, token_id in own.items()}
    differing = sorted(
        (i, token) for token, i in ids.items() if own.get(token, i) != i or tokens.get(i, token) != token
    )
    if differing:
        i, token = differing[0]
        raise CheckpointError(
            f"the tokenizers differ: {len(differing)} of {len(ids)} tokens have other ids in the draft: {token!r} is "
            f"{i} in {target_folder} and {own.get(token, 'no token')} in {folder}, where {i} is {tokens.get(i)!r}. Use "
            "a draft made for this target."
        )
    return True


def _open(folder: Path) -> tuple[TensorStore, Any]:
    """Open a draft's checkpoint and find the module of _KINDS that loads it. Raises CheckpointError."""
    store = TensorStore.open(folder)
    # Report an unsupported kind before quantised weights: converting those would not help.
    kind = _kind_of(store, list(_KINDS.values()))
    refuse_quantised(folder, dict(store.config.values), draft=True)
    if kind is None:
        raise CheckpointError(
            f"{store.config.place} must describe a supported kind of draft, got architectures "
            f"{store.config.values.get('architectures')!r:.80}. Supported are {'; '.join(_KINDS)}."
        )
    return store, kind


def aux_hidden_state_layers(folder: Path, num_target_layers: int) -> tuple[int, ...] | None:
    """Return the target's layers whose input states, concatenated, the draft in `folder` reads (auxiliary states).

    None: the draft reads the target's last hidden states, or none. Raises CheckpointError.
    """
    store = TensorStore.open(folder)
    kind = _kind_of(store, [dspark, dflash2, dflash, eagle3])
    layers: tuple[int, ...] | None = None if kind is None else kind.aux_hidden_state_layers(store, num_target_layers)
    return layers


def _kind_of(store: TensorStore, modules: Sequence[Any]) -> Any:
    """Return the first module that serves the checkpoint, or None. Raises CheckpointError for an unsupported kind."""
    for unserved in _UNSERVED:
        if (evidence := unserved.evidence(store)) is not None:
            raise CheckpointError(
                f"{store.config.place} describes an unsupported kind of draft: {unserved.name} (found {evidence}). "
                f"Supported are {'; '.join(_KINDS)}."
            )
    return next((module for module in modules if module.serves(store)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnservedKind:
    """A published kind that this library does not support. Any of these identifies it:

    name           its name, and how it differs from the supported kinds
    architectures  in config.json
    type           speculators_model_type in config.json
    projector      projector_type in config.json or its dflash_config
    tensors        a pattern that the start of a tensor's name matches
    """

    name: str
    architectures: tuple[str, ...] = ()
    type: str | None = None
    projector: str | None = None
    tensors: str | None = None

    def evidence(self, store: TensorStore) -> str | None:
        """Return what identifies the checkpoint as this kind, or None if it is another."""
        config = store.config
        if self.type is not None and config.values.get("speculators_model_type") == self.type:
            return f"speculators_model_type {self.type!r}"
        if named := [name for name in store.architectures if name in self.architectures]:
            return f"architectures {named}"
        for section in (config, config.section("dflash_config")):
            if self.projector is not None and section.values.get("projector_type") == self.projector:
                return f"projector_type {self.projector!r}"
        names = sorted(store.names()) if self.tensors is not None else []
        tensor = next((name for name in names if re.match(self.tensors or "", name)), None)
        return None if tensor is None else f"tensor {tensor}"


_UNSERVED = (
    UnservedKind(
        name="XPress, DFlash with a head that refines a block in several passes",
        architectures=("Qwen3XPressModel", "DFlashQwen3XPressModel", "XPressDraftModel"),
        type="xpress",
        tensors=r"(model\.)?(xpress_head|refiner_head)\.",
    ),
    UnservedKind(
        name="LiLiCorr, DFlash with attention over a block's candidates",
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
        name="multi-token prediction with an indexer for sparse attention, as in GLM-5 and DeepSeek-V3.2",
        tensors=r"model\.layers\.\d+\.self_attn\.indexer\.",
    ),
    UnservedKind(
        name="Qwen's multi-token prediction with hyper-connections",
        tensors=r"mtp\.hyper_connection_mixer\.",
    ),
    UnservedKind(
        name="MiMo-V2's multi-token prediction, with windows, sinks, and values narrower than keys",
        tensors=r"model\.mtp\.layers\.\d+\.",
    ),
)
"""Most have all tensors of a supported kind and some more, so they are checked before the supported kinds."""
