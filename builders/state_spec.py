"""The recurrence that a group of layers computes, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from builders.errors import type_problems
from builders.spec import SpecError


class RecurrenceRule(NamedTuple):
    """What distinguishes recurrences; see `Recurrence` for the formula."""

    has_matrix: bool = True
    """Otherwise the window of the convolution is all the state, and outputs are what the convolution gives."""
    activates: bool = True
    """Whether SiLU follows the convolution."""
    normalises: bool = True
    """Whether q and k get norm 1 (eps 1e-6 under the root), and q is divided by sqrt(key_dim)."""
    subtracts: bool = True
    """Whether an update is relative to what the state gives for the key already: the delta rule."""
    decays_by_channel: bool = False
    """Whether each key channel of a value head has a decay of its own."""
    skips: bool = False
    """Whether outputs can include v itself, times a weight per value head."""


class Recurrence(str, Enum):
    """How a state takes in a token, after a depthwise convolution over [q | k | v]; `rule` says what each does of it.

    With S [key_dim, value_dim] per value head and log decay g <= 0:
    S = exp(g) S; u = beta (v - S^T k); S = S + k u^T; out = S^T q + skip v.
    """

    GATED_DELTA = "gated_delta"
    """One decay per value head: the gated delta rule of arXiv 2412.06464 (Qwen3-Next, Qwen3.5)."""
    KDA = "kda"
    """One decay per value head and key channel: Kimi Delta Attention, arXiv 2510.26692."""
    SSD = "ssd"
    """Mamba2, arXiv 2405.21060: q is C, k is B, v is x, beta is dt, g is dt A and skip is D; u = beta v."""
    CONV = "conv"
    """The convolution alone, over v (LFM2)."""

    @property
    def rule(self) -> RecurrenceRule:
        """What this recurrence does of the formula."""
        return _RULES[self]


_RULES = {
    Recurrence.GATED_DELTA: RecurrenceRule(),
    Recurrence.KDA: RecurrenceRule(decays_by_channel=True),
    Recurrence.SSD: RecurrenceRule(normalises=False, subtracts=False, skips=True),
    Recurrence.CONV: RecurrenceRule(has_matrix=False, activates=False, normalises=False, subtracts=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """The recurrent state of one group of layers. If heads are sharded over several devices, the counts are per device.

    Raises SpecError, which lists every problem.
    """

    num_value_heads: int
    """A multiple of num_key_heads; consecutive value heads share a key head."""
    value_dim: int
    num_key_heads: int = 0
    """0 if and only if the recurrence has no matrix, as key_dim."""
    key_dim: int = 0
    journal: int
    """Tokens that a slot can hold beyond its checkpoint, at least as many as a step has query tokens of a request. A
    longer journal writes the checkpoint less often."""
    recurrence: Recurrence = Recurrence.GATED_DELTA
    conv_width: int = 4
    """Tokens that the convolution spans, the newest included."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of the convolution's inputs and weights, and of outputs."""
    state_dtype: torch.dtype = torch.float32
    """Dtype of a checkpoint. Journals are fp32."""
    tree: bool = False
    """Whether a batch can have query tokens that form trees; see `AttentionBatch.tree_masks`."""

    def __post_init__(self) -> None:
        if problems := type_problems(self) or self._problems():
            raise SpecError("this StateSpec is invalid: " + "; ".join(problems))

    def _problems(self) -> list[str]:
        keys, counts = ["num_key_heads", "key_dim"], ["num_value_heads", "value_dim", "journal", "conv_width"]
        if self.recurrence.rule.has_matrix:
            keys, counts = [], keys + counts
        problems = [f"{name} must be at least 1, got {value}" for name in counts if (value := getattr(self, name)) < 1]
        problems += [
            f"{name} must be 0 for {self.recurrence.value}, which has no keys, got {value}"
            for name in keys
            if (value := getattr(self, name))
        ]
        if self.num_key_heads > 0 and self.num_value_heads % self.num_key_heads:
            problems.append(
                f"num_value_heads must be a multiple of num_key_heads, got {self.num_value_heads} and "
                f"{self.num_key_heads}"
            )
        problems += [
            f"{name} must be a floating-point dtype, got {dtype}"
            for name, dtype in (("dtype", self.dtype), ("state_dtype", self.state_dtype))
            if not dtype.is_floating_point
        ]
        return problems

    @property
    def group_size(self) -> int:
        """Value heads that share one key head."""
        return self.num_value_heads // self.num_key_heads if self.num_key_heads else 1

    @property
    def matrices(self) -> int:
        """Value heads that have a matrix: all, or none."""
        return self.num_value_heads if self.recurrence.rule.has_matrix else 0

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: those of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def decay_dims(self) -> tuple[int, ...]:
        """Dims of a token's log decay."""
        return (self.matrices, self.key_dim) if self.recurrence.rule.decays_by_channel else (self.matrices,)

    def describe(self) -> str:
        """Return one line for tables and messages."""
        matrices = [f"{self.num_value_heads}/{self.num_key_heads} heads", f"dim {self.key_dim}/{self.value_dim}"]
        parts = [
            self.recurrence.value,
            *(matrices if self.recurrence.rule.has_matrix else [f"{self.conv_channels} channels"]),
            f"convolution {self.conv_width}",
            f"journal {self.journal}",
            str(self.dtype).removeprefix("torch."),
            f"state {str(self.state_dtype).removeprefix('torch.')}",
        ]
        return ", ".join(parts + ["tree"] * self.tree)
