"""The recurrent layer of Qwen3-Next and Qwen3.5: a gated delta rule after a short convolution, with a gated norm.

Legend: T tokens, H hidden size, HK key heads, HV value heads, Dk and Dv their dims, C channels of [q | k | v].
"""

from __future__ import annotations

import torch
from torch import nn

from attn_backends import StateInputs
from attn_backends.kernels.linear.fp8_weight import Weight
from attn_backends.kernels.linear.linear import linear
from attn_backends.kernels.rope import Rope
from builders import SpecError, StateSpec
from spec_decode.model_api import Attention, KeepRows, RecurrentAttention
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import ScopedWeights, frozen, held
from spec_decode.models.kernels.delta_gates import delta_gates
from spec_decode.models.kernels.norm_and_gate import norm_and_gate


def read_state_spec(config: ConfigReader) -> StateSpec:
    """Read the states of such layers, but for their journal and dtype. Raises CheckpointError."""
    try:
        return StateSpec(
            num_key_heads=config.get("linear_num_key_heads", int),
            num_value_heads=config.get("linear_num_value_heads", int),
            key_dim=config.get("linear_key_head_dim", int),
            value_dim=config.get("linear_value_head_dim", int),
            conv_width=config.get("linear_conv_kernel_dim", int),
            journal=1,
        )
    except SpecError as error:
        raise CheckpointError(f"invalid recurrent layers in {config.place}: {error}. Restore the file.") from error


class DeltaNet(nn.Module):
    """One layer, loaded from tensors with Qwen's names."""

    project_in: Weight
    out: Weight

    def __init__(self, spec: StateSpec, hidden: int, eps: float, weights: ScopedWeights, *, by_head: bool) -> None:
        """by_head: whether the rows of each key head are stored together, as Qwen3-Next's are, in two tensors; Qwen3.5
        has one for each part. Raises CheckpointError."""
        super().__init__()
        self.eps, self.channels, values = eps, spec.conv_channels, spec.num_value_heads * spec.value_dim
        gates = spec.num_value_heads
        joined: Weight
        if by_head:
            # Read first: only then are the sizes known to be those of real tensors.
            joined = weights.product(["in_proj_qkvz.weight"], [self.channels + values], hidden)
            joined = joined[_by_part(spec.num_key_heads, *_sizes(spec)).to(weights.device)]
            gated = weights.take("in_proj_ba.weight", 2 * gates, hidden)
            gated = gated[_by_part(spec.num_key_heads, *[spec.group_size] * 2).to(weights.device)]
        else:
            names = ["in_proj_qkv.weight", "in_proj_z.weight"]
            joined = weights.product(names, [self.channels, values], hidden)
            gated = weights.stacked(["in_proj_b.weight", "in_proj_a.weight"], [gates] * 2, hidden)
        # What gates a state keeps its bits: its products are small.
        self.project_in, self.project_gates = held(joined), frozen(gated)
        self.convolution = frozen(weights.take("conv1d.weight", self.channels, 1, spec.conv_width)[:, 0])
        self.a_log = weights.parameter("A_log", gates, dtype=torch.float32)
        self.dt_bias = weights.parameter("dt_bias", gates, dtype=torch.float32)
        self.norm = weights.parameter("norm.weight", spec.value_dim)
        self.out = weights.product(["out_proj.weight"], [hidden], values)

    def forward(
        self, x: torch.Tensor, rope: Rope, layer: int, attention: Attention, keep: KeepRows | None = None
    ) -> torch.Tensor:
        """Return the residual's delta [T, H], for the kept rows. x: [T, H], normed. rope: not used.

        attention: a RecurrentAttention.
        """
        states: RecurrentAttention = attention  # type: ignore[assignment]
        rows = linear(x, self.project_in)
        decay, beta = delta_gates(linear(x, self.project_gates), self.a_log, self.dt_bias)
        inputs = StateInputs(rows[:, : self.channels], decay, beta, self.convolution)
        taken_in, gate = states.recur(layer, inputs), rows[:, self.channels :]
        if keep is not None:
            taken_in, gate = keep(taken_in), keep(gate)
        return linear(norm_and_gate(taken_in, gate, self.norm, self.eps), self.out)


def _sizes(spec: StateSpec) -> tuple[int, int, int, int]:
    """Return the rows of query, key, value and gate that belong to a key head."""
    values = spec.group_size * spec.value_dim
    return spec.key_dim, spec.key_dim, values, values


def _by_part(heads: int, *sizes: int) -> torch.Tensor:
    """Return where each row is that is stored with its head: int64 [heads * sum(sizes)], part after part."""
    stored = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in stored.split(sizes, 1)])
