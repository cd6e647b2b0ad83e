"""What a backend of recurrent state supports, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from attn_backends.capabilities import (
    Sizes,
    are_device_types,
    device_reasons,
    is_set_of,
    is_tuple_of,
    is_version,
    require_all,
)
from builders import Recurrence, StateSpec


class StateFeature(str, Enum):
    """Optional parts of recurrent state."""

    GROUPED_KEYS = "grouped_keys"
    """Value heads that share a key head."""
    TREE = "tree"
    """Query tokens that form trees; see `StateSpec.tree`."""
    BITWISE_ROLLBACK = "bitwise_rollback"
    """A state after rejected tokens has the bits of one that never saw them. No spec asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCapabilities:
    """What a state backend claims. Selection, rejections, test cases and the matrix all read this one record.

    Raises CapabilitiesError for a field of the wrong type, and for an empty field that must not be empty.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    recurrences: tuple[Recurrence, ...]
    key_dims: Sizes
    value_dims: Sizes
    """Of matrices, as key_dims: nothing is asked of the dims of a recurrence without them."""
    conv_widths: Sizes
    journals: Sizes
    features: frozenset[StateFeature]
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    compute_capability: tuple[int, int] = (8, 0)
    """The minimum for a CUDA device."""
    one_major_version: bool = False
    """Whether the kernels are compiled for that major version only."""

    def __post_init__(self) -> None:
        dtypes = "a tuple of torch dtypes, one or more"
        sizes = ("key_dims", "value_dims", "conv_widths", "journals")
        require_all(
            self,
            ("devices", "a tuple of types such as 'cpu' and 'cuda', one or more", are_device_types(self.devices)),
            ("dtypes", dtypes, is_tuple_of(torch.dtype, self.dtypes)),
            ("recurrences", "a tuple of Recurrence, one or more", is_tuple_of(Recurrence, self.recurrences)),
            *((name, "a Sizes", isinstance(getattr(self, name), Sizes)) for name in sizes),
            ("features", "a frozenset of StateFeature", is_set_of(StateFeature, self.features)),
            ("state_dtypes", dtypes, is_tuple_of(torch.dtype, self.state_dtypes)),
            ("compute_capability", "two counts such as (8, 0)", is_version(self.compute_capability)),
            ("one_major_version", "a bool", isinstance(self.one_major_version, bool)),
        )

    def unsupported_reasons(self, spec: StateSpec, device: torch.device) -> list[str]:
        """Return why this spec cannot run on this device; empty if it can."""
        reasons = device_reasons(self.devices, self.compute_capability, self.one_major_version, device)
        listed = {"recurrence": self.recurrences, "dtype": self.dtypes, "state_dtype": self.state_dtypes}
        reasons += [
            f"{name} must be {' or '.join(map(_name, served))}, got {_name(getattr(spec, name))}"
            for name, served in listed.items()
            if getattr(spec, name) not in served
        ]
        dims = [("conv_width", spec.conv_width, self.conv_widths), ("journal", spec.journal, self.journals)]
        if spec.matrices:
            dims = [("key_dim", spec.key_dim, self.key_dims), ("value_dim", spec.value_dim, self.value_dims), *dims]
        reasons += [f"{name} must be {served}, got {got}" for name, got, served in dims if got not in served]
        return reasons + [f"has no {each.value}" for each in features_used(spec) if each not in self.features]


def features_used(spec: StateSpec) -> list[StateFeature]:
    """Return the features that a spec asks for."""
    used = {StateFeature.GROUPED_KEYS: spec.group_size > 1, StateFeature.TREE: spec.tree}
    return [feature for feature, is_used in used.items() if is_used]


def _name(value: object) -> str:
    return value.value if isinstance(value, Recurrence) else str(value).removeprefix("torch.")
