"""Quantise the linear weights of a loaded draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from builders.errors import did_you_mean, require
from spec_decode.model_api import DraftModel
from spec_decode.models.kernels.fp8_weight import Fp8Weight
from spec_decode.models.layers.feed_forward import FeedForward
from spec_decode.models.layers.grouped_attention import GroupedAttention
from spec_decode.models.layers.linear import FusingLinear
from spec_decode.models.layers.mla_attention import MlaAttention
from spec_decode.models.layers.moe import Experts
from spec_decode.models.layers.window_attention import WindowAttention
from spec_decode.models.target_head import TargetHead

DRAFT_WEIGHTS = ("fp8",)
"""The formats: fp8 is float8_e4m3fn with a scale for each output."""

_QUANTISED = (torch.bfloat16, torch.float16)
_CAPABILITY = (8, 9)
"""The lowest compute capability with instructions that convert float8_e4m3fn."""
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


def check_draft_weights(weights: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise BatchError unless a draft of this dtype, on this device, can have its weights in this format."""
    require(
        weights in DRAFT_WEIGHTS,
        f"draft_weights is {weights!r}.{did_you_mean(str(weights), DRAFT_WEIGHTS)} Pass one of "
        f"{', '.join(DRAFT_WEIGHTS)}, or leave it out to keep the loaded weights.",
    )
    require(
        dtype in _QUANTISED,
        f"draft_weights={weights!r} needs a draft in bfloat16 or float16, got "
        f"{str(dtype).removeprefix('torch.')}. Load the models with dtype bfloat16, or leave draft_weights out.",
    )
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        require(
            capability >= _CAPABILITY,
            f"draft_weights={weights!r} needs compute capability 8.9 or more to convert its numbers, {device} has "
            f"{'.'.join(map(str, capability))}. Leave draft_weights out.",
        )


def quantise_draft(draft: DraftModel, weights: str = "fp8") -> None:
    """Quantise the draft's linear weights to 8 bits in place: float8_e4m3fn with a scale for each output.

    A draft that shares the target's head gets its own copy. The target and the embedding stay as they are. Call this
    before a Drafter captures graphs of the draft. The drafted tokens and the acceptance rate change a little; the
    target's text does not change.

    Raises BatchError, with nothing changed, for an unknown format, a model that is not a draft, a draft that is neither
    in bfloat16 nor float16 or is already quantised, a GPU of compute capability below 8.9, a draft that uses none of
    this library's linear layers, and one that uses the head of a target whose logits are more than a product.
    """
    require(
        isinstance(draft, DraftModel),
        f"quantise_draft takes a DraftModel, got {type(draft).__name__}. Pass the draft; targets are not quantised.",
    )
    places = list(_places(draft))
    require(
        bool(places),
        f"{type(draft).__name__} uses none of this library's linear layers, and only these read 8-bit weights. Leave "
        "draft_weights out.",
    )
    for place in places:
        _checked(place, weights)
    head: Fp8Weight | None = None
    for place in places:
        if isinstance(place.module, TargetHead):
            # All prediction modules share one copy.
            quantised = head = Fp8Weight.of(_checked(place, weights)) if head is None else head
        else:
            quantised = Fp8Weight.of(_checked(place, weights))
        # nn.Module rejects a module under the name of a parameter.
        delattr(place.module, place.name)
        setattr(place.module, place.name, quantised)


def _places(draft: DraftModel) -> Iterator[_Place]:
    for module in draft.modules():
        names = [name for kind, names in _PRODUCTS.items() if isinstance(module, kind) for name in names]
        places = [_Place(module, name) for name in names]
        # A layer can lack a weight; a TargetHead whose target does not say its own is refused.
        yield from (place for place in places if place.weight is not None or isinstance(module, TargetHead))


def _checked(place: _Place, weights: str) -> torch.Tensor:
    """Return the weight in 16 bits. Raises BatchError."""
    weight = place.weight
    require(
        not isinstance(weight, Fp8Weight),
        "the draft's weights are already in 8 bits. Call quantise_draft once for each loaded draft.",
    )
    require(
        weight is not None,
        "the draft uses its target's head, and the target has no output_projection: it scales or caps its logits, adds "
        "a bias to them, or does not define the property. Leave draft_weights out, or use a draft with its own head.",
    )
    assert isinstance(weight, torch.Tensor)
    check_draft_weights(weights, weight.dtype, weight.device)
    return weight
