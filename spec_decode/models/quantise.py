"""Quantise the linear weights of a loaded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from attn_backends.kernels.linear.fp8_weight import READING, Fp8Weight
from builders.devices import converts_fp8
from builders.errors import BatchError, did_you_mean, require
from spec_decode.model_api import DraftModel, TargetModel
from spec_decode.models.layers.feed_forward import FeedForward
from spec_decode.models.layers.grouped_attention import GroupedAttention
from spec_decode.models.layers.linear import FusingLinear
from spec_decode.models.layers.mla_attention import MlaAttention
from spec_decode.models.layers.moe import Experts
from spec_decode.models.layers.window_attention import WindowAttention
from spec_decode.models.target_head import TargetHead

FORMATS = ("fp8",)
"""fp8 is float8_e4m3fn with a scale for each output."""

_PRODUCTS: dict[type[nn.Module], tuple[str, ...]] = {
    FusingLinear: ("weight",),
    FeedForward: ("gate_up", "down"),
    Experts: ("gate_up", "down"),
    GroupedAttention: ("project_in", "out"),
    MlaAttention: ("project_in", "q_up", "out"),
    WindowAttention: ("project_in", "q_up", "out_up"),
    TargetHead: ("weight",),
}
"""The weights of each module that it passes to `linear` or a similar function. All others stay as they are: embeddings
and other tables, norms, routers, hyper-connections, convolutions, and the projections that latent attention folds into
its heads."""


class _Place(NamedTuple):
    """A module attribute that holds a weight."""

    module: nn.Module
    name: str

    @property
    def weight(self) -> object:
        """The attribute's value, or the target's weight for a TargetHead without its own."""
        weight: object = getattr(self.module, self.name)
        return self.module.shared if weight is None and isinstance(self.module, TargetHead) else weight


def check_format(setting: str, weights: object, dtype: torch.dtype, device: torch.device) -> None:
    """Raise BatchError unless a model of this dtype, on this device, can have its weights in this format.

    setting: what asks for it, `weights` for a target or `draft_weights`.
    """
    require(
        weights in FORMATS,
        f"{setting} is {weights!r}.{did_you_mean(str(weights), FORMATS)} Pass one of {', '.join(FORMATS)}, or leave it "
        "out to keep the loaded weights.",
    )
    require(
        dtype in READING,
        f"{setting}={weights!r} needs models in bfloat16 or float16, got {str(dtype).removeprefix('torch.')}. Load "
        f"them with dtype bfloat16 (--dtype on the command line), or leave {setting} out.",
    )
    if not converts_fp8(device):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise BatchError(
            f"{setting}={weights!r} needs compute capability 8.9 or more to convert its numbers, {device} has {found}. "
            f"Leave {setting} out."
        )


def quantise_target(target: TargetModel) -> None:
    """Quantise the linear weights of a target as `quantise_draft` does a draft's; a head that is tied to the embedding
    becomes a copy. Raises BatchError, with nothing changed, for weights that `check_format` rejects."""
    _quantise(list(_places(target)), "weights", "fp8")


def quantise_draft(draft: DraftModel, weights: str = "fp8") -> None:
    """Quantise the draft's linear weights to 8 bits in place: float8_e4m3fn with a scale for each output.

    A draft that shares the target's head gets its own copy, unless the target's is in 8 bits. The target and the
    embedding stay as they are. Call this before a Drafter captures graphs of the draft. The drafted tokens and the
    acceptance rate change a little; the target's text does not change.

    Raises BatchError, with nothing changed, for an unknown format, a model that is not a draft, a draft that is neither
    in bfloat16 nor float16 or is already quantised, a GPU of compute capability below 8.9, a draft that uses none of
    this library's linear layers, and one that uses the head of a target whose logits are more than a product.
    """
    require(
        isinstance(draft, DraftModel),
        f"quantise_draft takes a DraftModel, got {type(draft).__name__}. Pass the draft.",
    )
    places = list(_places(draft))
    require(
        bool(places),
        f"{type(draft).__name__} uses none of this library's linear layers, and only these read 8-bit weights. Leave "
        "draft_weights out.",
    )
    _quantise(places, "draft_weights", weights)


def _quantise(places: Sequence[_Place], setting: str, weights: str) -> None:
    for place in places:
        _checked(place, setting, weights)
    head: Fp8Weight | None = None
    for place in places:
        if isinstance(place.module, TargetHead):
            # All prediction modules share one copy.
            quantised = head = Fp8Weight.of(_checked(place, setting, weights)) if head is None else head
        else:
            quantised = Fp8Weight.of(_checked(place, setting, weights))
        # nn.Module rejects a module under the name of a parameter.
        delattr(place.module, place.name)
        setattr(place.module, place.name, quantised)


def _places(model: nn.Module) -> Iterator[_Place]:
    for module in model.modules():
        names = [name for kind, names in _PRODUCTS.items() if isinstance(module, kind) for name in names]
        if isinstance(module, TargetHead) and module.is_quantised:
            continue
        places = [_Place(module, name) for name in names]
        # A layer can lack a weight; a TargetHead whose target does not say its own is refused.
        yield from (place for place in places if place.weight is not None or isinstance(module, TargetHead))


def _checked(place: _Place, setting: str, weights: str) -> torch.Tensor:
    """Return the weight in 16 bits. Raises BatchError."""
    weight = place.weight
    require(
        not isinstance(weight, Fp8Weight),
        "the weights are already in 8 bits. Quantise a loaded model once.",
    )
    require(
        weight is not None,
        "the draft uses its target's head, and the target has no output_projection: it scales or caps its logits, adds "
        "a bias to them, or does not define the property. Leave draft_weights out, or use a draft with its own head.",
    )
    assert isinstance(weight, torch.Tensor)
    check_format(setting, weights, weight.dtype, weight.device)
    return weight
