"""The attention that a group of layers computes, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from builders.errors import type_problems

MAX_TREE_TOKENS = 64
"""Maximum query tokens in a request's tree: a token's ancestors are the bits of one 64-bit word."""


class AttentionKind(str, Enum):
    """How keys and values are stored."""

    MHA = "mha"
    """One key and one value per KV head."""
    MLA = "mla"
    """One latent per token for all query heads: it is the key, and its first value_dim dims are the value."""


class SpecError(ValueError):
    """An AttentionSpec is invalid; the message lists every problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The attention of one KV group. A query at position p sees positions max(0, p - sliding_window + 1) .. p, and if
    the group is not causal, later positions too.

    With s_j = soft_cap * tanh(scale * q.k_j / soft_cap) (or scale * q.k_j without a cap) and a per-head sink z:
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(z)).

    If heads are sharded over several devices, the counts are per device.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    value_dim: int | None = None
    """Dim of a value head; None means head_dim."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of queries and outputs."""
    kv_dtype: torch.dtype | None = None
    """Dtype of the KV cache; None means dtype."""
    sliding_window: int | None = None
    """Tokens a query sees, itself included; None means all."""
    scale: float | None = None
    """Factor on q.k; positive, because kernels take a row's maximum before they scale. None means head_dim ** -0.5."""
    soft_cap: float | None = None
    sinks: bool = False
    """Whether each query head has an fp32 sink logit, passed to the forward as ``sinks [num_q_heads]``."""
    kind: AttentionKind = AttentionKind.MHA
    causal: bool = True
    """If False, a query also sees the later tokens of its request, as in a block of drafts predicted at once. The
    window does not limit those; it equals published drafts' symmetric window while a block is no longer than it."""
    batch_invariant: bool = False
    """Whether a query's output must be bitwise the same for any other requests and query tokens in the batch."""
    tree: bool = False
    """Whether a batch can have query tokens that form trees; see `AttentionBatch.tree_masks`."""
    head_scales: bool = False
    """Whether each KV head of a float8_e4m3fn cache has its own scales; False: one for keys and one for values."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if self.value_dim is None:
            set_field(self, "value_dim", self.head_dim)
        if self.kv_dtype is None:
            set_field(self, "kv_dtype", self.dtype)
        if self.scale is None and type(self.head_dim) is int and self.head_dim > 0:
            set_field(self, "scale", self.head_dim**-0.5)
        if problems := type_problems(self) or self._problems():
            raise SpecError("this AttentionSpec is invalid: " + "; ".join(problems))

    def _problems(self) -> list[str]:
        problems = [
            f"{name} must be at least 1, got {value}"
            for name in ("num_q_heads", "num_kv_heads", "head_dim", "value_dim", "page_size")
            if (value := getattr(self, name)) < 1
        ]
        if not self.dtype.is_floating_point:
            problems.append(f"dtype is of queries and outputs and must be a floating-point dtype, got {self.dtype}")
        elif not self.cache_dtype.is_floating_point and self.cache_dtype not in (torch.int8, torch.uint8):
            problems.append(f"kv_dtype must be a floating-point dtype, torch.int8 or torch.uint8, got {self.kv_dtype}")
        if self.num_kv_heads > 0 and self.num_q_heads % self.num_kv_heads:
            problems.append(
                f"num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} and {self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            problems.append(f"sliding_window counts the query itself and must be at least 1, got {self.sliding_window}")
        problems += [
            f"{name} must be positive, got {value}"
            for name in ("scale", "soft_cap")
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        if self.kind is AttentionKind.MLA and (self.num_kv_heads != 1 or self.out_dim > self.head_dim):
            problems.append(
                "mla keeps one latent per token, whose first value_dim dims are the value: num_kv_heads must be 1 and "
                f"value_dim at most head_dim, got {self.num_kv_heads} and {self.out_dim} of {self.head_dim}"
            )
        if self.tree and not self.causal:
            problems.append(
                "a tree's masks say which query tokens see each other, so a spec with trees must be causal, got "
                "causal=False"
            )
        if self.tree and self.sliding_window is not None and self.sliding_window < MAX_TREE_TOKENS:
            problems.append(
                f"a tree's tokens must all lie within the window of each, so sliding_window must be at least "
                f"{MAX_TREE_TOKENS}, got {self.sliding_window}"
            )
        if self.head_scales and not self.num_kv_scales:
            problems.append(
                f"head_scales are those of keys and values in torch.float8_e4m3fn, got {self.kind.value} in "
                f"{self.cache_dtype}"
            )
        return problems

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def window_left(self) -> int:
        """Tokens before its own that a query sees; -1 for all, the convention of kernel libraries."""
        return -1 if self.sliding_window is None else self.sliding_window - 1

    @property
    def out_dim(self) -> int:
        """Dim of a value head, resolved."""
        assert self.value_dim is not None
        return self.value_dim

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the KV cache, resolved."""
        assert self.kv_dtype is not None
        return self.kv_dtype

    @property
    def num_kv_scales(self) -> int:
        """Scales of keys, and as many of values: none unless keys and values are stored as float8_e4m3fn."""
        if self.cache_dtype is not torch.float8_e4m3fn or self.kind is AttentionKind.MLA:
            return 0
        return self.num_kv_heads if self.head_scales else 1

    @property
    def new_kv_dtype(self) -> torch.dtype:
        """Dtype of new keys and values as passed in: the cache's, or `dtype` if storing quantises."""
        return self.dtype if self.cache_dtype.itemsize == 1 else self.cache_dtype

    @property
    def softmax_scale(self) -> float:
        """Factor on q.k, resolved."""
        assert self.scale is not None
        return self.scale

    def describe(self) -> str:
        """Return one line for tables and messages."""
        parts = [
            f"{self.num_q_heads}/{self.num_kv_heads} heads",
            f"dim {self.head_dim}" + (f"/{self.out_dim}" if self.out_dim != self.head_dim else ""),
            f"page {self.page_size}",
            str(self.dtype).removeprefix("torch."),
        ]
        if self.cache_dtype != self.dtype:
            parts.append(f"kv {str(self.cache_dtype).removeprefix('torch.')}")
        if self.head_scales:
            parts.append("head scales")
        if self.sliding_window is not None:
            parts.append(f"window {self.sliding_window}")
        if self.soft_cap is not None:
            parts.append(f"soft cap {self.soft_cap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.kind is not AttentionKind.MHA:
            parts.append(self.kind.value)
        if self.batch_invariant:
            parts.append("batch invariant")
        if not self.causal:
            parts.append("not causal")
        if self.tree:
            parts.append("tree")
        return ", ".join(parts)
