"""A draft from a folder, whichever kind of draft is in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from spec_decode.models import causal_lm, deepseek_v4, eagle, eagle3, mtp
from spec_decode.models.base import DraftModel, TargetModel
from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore


class _Load(Protocol):
    def __call__(
        self, store: TensorStore, target: TargetModel, *, dtype: torch.dtype, device: torch.device
    ) -> DraftModel: ...


class _Kind(NamedTuple):
    name: str
    serves: Callable[[TensorStore], bool]
    load: _Load


def _listed(name: str, architectures: Sequence[str]) -> str:
    return f"{name} ({', '.join(architectures)})"


_KINDS = (
    _Kind("EAGLE-3 (d2t or hidden_norm among its tensors)", eagle3.serves, eagle3.load),
    _Kind("EAGLE (fc.weight among its tensors)", eagle.serves, eagle.load),
    _Kind(_listed("multi-token prediction", mtp.ARCHITECTURES), lambda store: mtp.serves(store.config), mtp.load),
    _Kind(
        _listed("DeepSeek-V4's multi-token prediction", deepseek_v4.ARCHITECTURES),
        lambda store: deepseek_v4.serves(store.config),
        deepseek_v4.load,
    ),
    _Kind(_listed("a causal language model", causal_lm.ARCHITECTURES), causal_lm.serves, causal_lm.load),
)
"""The first that serves a checkpoint loads it: drafts are often published under their target's architecture."""


def load_draft(
    folder: Path, target: TargetModel, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> DraftModel:
    """The draft of a published checkpoint, made for `target` and ready to run.

    The folder holds config.json and weights as safetensors or PyTorch's .bin, in shards or not. An EAGLE draft uses the
    target's `embed` (weight [V, H]), where it brings none, and `logits`. Raises CheckpointError, with nothing kept, for
    anything amiss in the folder and for a draft that does not fit the target.
    """
    store = TensorStore.open(folder)
    kind = next((kind for kind in _KINDS if kind.serves(store)), None)
    if kind is None:
        raise CheckpointError(
            f"{folder} must hold a draft of a known kind, got architectures {store.config.get('architectures')}; "
            f"nothing was loaded. Known are {'; '.join(kind.name for kind in _KINDS)}."
        )
    return kind.load(store, target, dtype=dtype, device=torch.device(device))


def aux_hidden_state_layers(folder: Path, num_target_layers: int) -> tuple[int, ...] | None:
    """The target's layers whose incoming states the draft in `folder` reads, side by side: its auxiliary hidden states.

    None: it reads the target's last hidden states, or nothing. Raises CheckpointError.
    """
    store = TensorStore.open(folder)
    return eagle3.aux_hidden_state_layers(store, num_target_layers) if eagle3.serves(store) else None
