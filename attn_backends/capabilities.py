"""What a backend supports, as data, and its answer to a spec: accepted, or rejected with every reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TypeGuard, cast

import torch

from attn_backends.kv_cache import cache_layout
from builders import AttentionKind, AttentionSpec


class Feature(str, Enum):
    """Optional parts of attention."""

    GQA = "gqa"
    SLIDING_WINDOW = "sliding_window"
    SOFT_CAP = "soft_cap"
    SINKS = "sinks"
    VALUE_DIM = "value_dim"
    """A value dim that differs from the head dim."""
    BATCH_INVARIANT = "batch_invariant"
    """Outputs whose bits do not depend on the rest of the batch; see `AttentionSpec.batch_invariant`."""
    NON_CAUSAL = "non_causal"
    """Queries that also see later tokens; see `AttentionSpec.causal`."""
    TREE = "tree"
    """Query tokens that form trees; see `AttentionBatch.tree_masks`."""
    HEAD_SCALES = "head_scales"
    """Scales of an 8-bit cache that differ between KV heads; see `AttentionSpec.head_scales`."""


class FusedWrite(str, Enum):
    """What a backend computes in the kernel that writes the cache; see `attn_backends.fused_writes` for the methods."""

    ROPE = "rope"
    """Rotate queries and keys; see `FusedRopeWrite`."""
    KV_A_NORM_ROPE = "kv_a_norm_rope"
    """Norm and rotate a latent; see `FusedLatentWrite`."""

    @property
    def method(self) -> str:
        """The method that a backend declaring this write must have."""
        return "rope_and_write_kv" if self is FusedWrite.ROPE else "norm_rope_and_write_latent"


class CapabilitiesError(ValueError):
    """A capability record is invalid; the message lists every problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A set of sizes: minimum..maximum, optionally only powers of two, multiples, or those among a few.

    Raises CapabilitiesError for values that are not ints or are below 1, and for an empty set.
    """

    minimum: int = 1
    maximum: int | None = None
    power_of_two: bool = False
    multiple_of: int = 1
    among: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_all(
            self,
            ("minimum", "1 or more", _is_count(self.minimum)),
            ("maximum", "1 or more, or None", self.maximum is None or _is_count(self.maximum)),
            ("power_of_two", "a bool", isinstance(self.power_of_two, bool)),
            ("multiple_of", "1 or more", _is_count(self.multiple_of)),
            ("among", "a tuple of sizes, or None", self.among is None or _are_counts(self.among)),
        )
        if self.smallest not in self:
            raise CapabilitiesError(
                f"sizes must contain at least one, none is {self}; every spec would be rejected. Loosen a limit."
            )

    @property
    def smallest(self) -> int:
        """The first size of the set."""
        if self.among is not None:
            return min((size for size in self.among if size in self), default=0)
        if self.power_of_two:
            return max(self.multiple_of, 1 << (self.minimum - 1).bit_length())
        return -(-self.minimum // self.multiple_of) * self.multiple_of

    @property
    def largest(self) -> int | None:
        """The last size of the set; None if it has no end."""
        if self.among is not None:
            return max(size for size in self.among if size in self)
        if self.maximum is None:
            return None
        if self.power_of_two:
            return 1 << (self.maximum.bit_length() - 1)
        return self.maximum - self.maximum % self.multiple_of

    def __contains__(self, size: int) -> bool:
        return (
            size >= self.minimum
            and (self.maximum is None or size <= self.maximum)
            and size % self.multiple_of == 0
            and (not self.power_of_two or size & (size - 1) == 0)
            and (self.among is None or size in self.among)
        )

    def __str__(self) -> str:
        if self.minimum == self.maximum:
            return str(self.minimum)
        if self.among is not None:
            sizes = [str(size) for size in sorted(self.among) if size in self]
            return f"one of {', '.join(sizes)}"
        span = f"{self.minimum} to {self.maximum}" if self.maximum is not None else f"at least {self.minimum}"
        extra = ", a power of two" if self.power_of_two else ""
        return span + extra + (f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else "")


@dataclass(frozen=True, slots=True)
class Accepted:
    """The backend serves the spec."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Rejected:
    """The backend does not serve the spec; `reasons` lists every reason as text."""

    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend claims. Selection, rejections, test cases and the matrix all read this one record.

    Raises CapabilitiesError for a field of the wrong type, and for an empty field that must not be empty.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: Sizes
    page_sizes: Sizes
    features: frozenset[Feature]
    required: frozenset[Feature] = frozenset()
    """Features that every spec must use, because the kernels cannot compute attention without them."""
    kinds: tuple[AttentionKind, ...] = (AttentionKind.MHA,)
    value_dims: Sizes | None = None
    """None means head_dims."""
    kv_dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes of the KV cache in addition to the queries' dtype."""
    quantises_queries: bool = False
    """Whether queries and weights are also rounded to a cache's dtype if it is narrower."""
    rounds_partials: bool = False
    """Whether outputs over parts of a prefix are rounded to the queries' dtype and summed in it."""
    lowest_score: float | None = None
    """Scores below this can count as masked: a token that sees none higher then attends to nothing. None: no limit."""
    mixed_kv_dtypes: bool = False
    """Whether the KV cache can have one of `dtypes` other than the queries' dtype."""
    fused_writes: frozenset[FusedWrite] = frozenset()
    """Work before a cache write that the write's kernel also does."""
    compute_capability: tuple[int, int] = (8, 0)
    """The minimum for a CUDA device."""
    one_major_version: bool = False
    """Whether the kernels are compiled for that major version only."""

    def __post_init__(self) -> None:
        sizes, dtypes, features = "a Sizes", "torch dtypes", "a frozenset of Feature"
        valid_features = is_set_of(Feature, self.features)
        required = is_set_of(Feature, self.required) and (not valid_features or self.required <= self.features)
        require_all(
            self,
            ("devices", "a tuple of types such as 'cpu' and 'cuda', one or more", are_device_types(self.devices)),
            ("dtypes", f"a tuple of {dtypes}, one or more", is_tuple_of(torch.dtype, self.dtypes)),
            ("head_dims", sizes, isinstance(self.head_dims, Sizes)),
            ("page_sizes", sizes, isinstance(self.page_sizes, Sizes)),
            ("features", features, valid_features),
            ("required", f"{features} in `features`", required),
            ("kinds", "a tuple of AttentionKind, one or more", is_tuple_of(AttentionKind, self.kinds)),
            ("value_dims", f"{sizes} or None", self.value_dims is None or isinstance(self.value_dims, Sizes)),
            ("kv_dtypes", f"a tuple of {dtypes}", self.kv_dtypes == () or is_tuple_of(torch.dtype, self.kv_dtypes)),
            ("quantises_queries", "a bool", isinstance(self.quantises_queries, bool)),
            ("rounds_partials", "a bool", isinstance(self.rounds_partials, bool)),
            ("lowest_score", "a finite float below 0, or None", _is_low(self.lowest_score)),
            ("mixed_kv_dtypes", "a bool", isinstance(self.mixed_kv_dtypes, bool)),
            ("fused_writes", "a frozenset of FusedWrite", is_set_of(FusedWrite, self.fused_writes)),
            ("compute_capability", "two counts such as (8, 0)", is_version(self.compute_capability)),
            ("one_major_version", "a bool", isinstance(self.one_major_version, bool)),
        )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        """Return why this spec cannot run on this device; empty if it can."""
        return [*self._device_reasons(device), *self.spec_reasons(spec)]

    def spec_reasons(self, spec: AttentionSpec) -> list[str]:
        """Return why no device can run this spec; empty if some device can."""
        return [*self._shape_reasons(spec), *self._feature_reasons(spec)]

    def _device_reasons(self, device: torch.device) -> list[str]:
        return device_reasons(self.devices, self.compute_capability, self.one_major_version, device)

    def _shape_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = []
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        if spec.dtype not in self.dtypes:
            reasons.append(f"dtype must be one of {names}, got {spec.dtype}")
        if spec.cache_dtype not in (*self.dtypes, *self.kv_dtypes):
            more = "".join(f", {str(dtype).removeprefix('torch.')}" for dtype in self.kv_dtypes)
            reasons.append(f"kv_dtype must be one of {names}{more}, got {spec.cache_dtype}")
        elif spec.cache_dtype not in (spec.dtype, *self.kv_dtypes) and not self.mixed_kv_dtypes:
            reasons.append(f"kv_dtype must equal dtype, got {spec.cache_dtype} and {spec.dtype}")
        reasons += [
            f"{name} must be {sizes}, got {dim}"
            for name, dim, sizes in (
                ("head_dim", spec.head_dim, self.head_dims),
                ("value_dim", spec.out_dim, self.value_dims or self.head_dims),
            )
            if dim not in sizes
        ]
        reasons += cache_layout(spec).unsupported_reasons(spec)
        if spec.page_size not in self.page_sizes:
            reasons.append(f"page_size must be {self.page_sizes}, got {spec.page_size}")
        if spec.kind not in self.kinds:
            reasons.append(f"serves {', '.join(k.value for k in self.kinds)}, not {spec.kind.value}")
        return reasons

    def _feature_reasons(self, spec: AttentionSpec) -> list[str]:
        requested = features_of(spec)
        missing = [f"has no {feature.value}" for feature in requested if feature not in self.features]
        return missing + [
            f"serves only specs with {feature.value}" for feature in self.required if feature not in requested
        ]


def device_reasons(
    devices: tuple[str, ...], compute_capability: tuple[int, int], one_major_version: bool, device: torch.device
) -> list[str]:
    """Return why kernels of these claims cannot run on the device; empty if they can."""
    if device.type not in devices:
        return [f"runs on {' and '.join(devices)}, not on {device.type}"]
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return ["needs a CUDA device and this machine has none"]
        return capability_reasons(compute_capability, one_major_version, torch.cuda.get_device_capability(device))
    return []


def capability_reasons(
    compute_capability: tuple[int, int], one_major_version: bool, found: tuple[int, int]
) -> list[str]:
    """Return why kernels of these claims cannot run on a GPU of the compute capability `found`; empty if they can."""
    if found < compute_capability:
        return [f"needs compute capability {compute_capability}, the device has {found}"]
    if one_major_version and found[0] != compute_capability[0]:
        return [f"runs on compute capability {compute_capability[0]} only, the device has {found}"]
    return []


def is_version(value: object) -> TypeGuard[tuple[int, int]]:
    """Return whether it is a (major, minor) tuple. A negative number would sort before every real version."""
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(n, int) and n >= 0 for n in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_counts(sizes: object) -> bool:
    return is_tuple_of(int, sizes) and all(map(_is_count, cast("tuple[int, ...]", sizes)))


def is_tuple_of(kind: type, value: object) -> bool:
    return isinstance(value, tuple) and value != () and all(isinstance(item, kind) for item in value)


def _is_low(score: object) -> bool:
    return score is None or (isinstance(score, float) and -math.inf < score < 0)


def is_set_of(kind: type, value: object) -> bool:
    return isinstance(value, frozenset) and all(isinstance(item, kind) for item in value)


def are_device_types(value: object) -> bool:
    """Return whether all are torch device types. A type with an index would match no device, so it does not count."""
    try:
        return is_tuple_of(str, value) and all(torch.device(kind).type == kind for kind in cast("tuple[str]", value))
    except RuntimeError:
        return False


def require_all(record: object, *rules: tuple[str, str, bool]) -> None:
    """Raise CapabilitiesError for rules that do not hold. A rule: the field, what it must be, whether it is."""
    wrong = [f"{name} must be {rule}, got {getattr(record, name)!r}" for name, rule, holds in rules if not holds]
    if wrong:
        raise CapabilitiesError(
            f"{'; '.join(wrong)}: what the backend serves is unknown, so no {type(record).__name__} was created. Give "
            "each field such a value."
        )


def features_of(spec: AttentionSpec) -> list[Feature]:
    used = {
        Feature.GQA: spec.group_size > 1,
        Feature.SLIDING_WINDOW: spec.sliding_window is not None,
        Feature.SOFT_CAP: spec.soft_cap is not None,
        Feature.SINKS: spec.sinks,
        Feature.VALUE_DIM: spec.out_dim != spec.head_dim,
        Feature.BATCH_INVARIANT: spec.batch_invariant,
        Feature.NON_CAUSAL: not spec.causal,
        Feature.TREE: spec.tree,
        Feature.HEAD_SCALES: spec.head_scales,
    }
    return [feature for feature, is_used in used.items() if is_used]
