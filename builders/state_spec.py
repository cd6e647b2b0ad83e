"""The recurrence that a group of layers computes, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from builders.errors import type_problems
from builders.spec import SpecError


class Recurrence(str, Enum):
    """How a state takes in a token, after a depthwise convolution and SiLU over [q | k | v].

    With S [key_dim, value_dim] per value head, q and k of norm 1 (eps 1e-6 under the root), log decay g <= 0:
    S = exp(g) S; u = beta (v - S^T k); S = S + k u^T; out = S^T q / sqrt(key_dim).
    """

    GATED_DELTA = "gated_delta"
    """One decay per value head: the gated delta rule of arXiv 2412.06464 (Qwen3-Next, Qwen3.5)."""
    KDA = "kda"
    """One decay per value head and key channel: Kimi Delta Attention, arXiv 2510.26692."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """The recurrent state of one group of layers. If heads are sharded over several devices, the counts are per device.

    Raises SpecError, which lists every problem.
    """

    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads; consecutive value heads share a key head."""
    key_dim: int
    value_dim: int
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
        counts = ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "journal", "conv_width")
        problems = [f"{name} must be at least 1, got {value}" for name in counts if (value := getattr(self, name)) < 1]
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
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: those of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def decay_dims(self) -> tuple[int, ...]:
        """Dims of a token's log decay."""
        per_channel = self.recurrence is Recurrence.KDA
        return (self.num_value_heads, self.key_dim) if per_channel else (self.num_value_heads,)

    def describe(self) -> str:
        """Return one line for tables and messages."""
        parts = [
            self.recurrence.value,
            f"{self.num_value_heads}/{self.num_key_heads} heads",
            f"dim {self.key_dim}/{self.value_dim}",
            f"convolution {self.conv_width}",
            f"journal {self.journal}",
            str(self.dtype).removeprefix("torch."),
            f"state {str(self.state_dtype).removeprefix('torch.')}",
        ]
        return ", ".join(parts + ["tree"] * self.tree)
