"""Feed-forward blocks as DeepSeek's models have them: a gated layer, or a mixture of such layers.

Legend: T tokens, H hidden size, I intermediate size, E experts, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F

from spec_decode.models.published.grouped_linear import grouped_linear
from spec_decode.models.published.scoped_weights import frozen
from spec_decode.ops.skinny_linear import linear
from spec_decode.ops.swiglu import swiglu

Scoring = Literal["sigmoid", "softmax", "sqrtsoftplus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Which experts a token takes, and how it weighs them (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    A learnt bias takes part in the choice and not in the weights. The experts lie in `groups` of equal size, and only
    those of the top_groups best groups can be chosen; a group is as good as its two best experts together.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "sigmoid"
    groups: int = 1
    top_groups: int = 1
    normalised: bool = True
    """Whether a token's weights are made to sum up to 1, before they are scaled."""
    scale: float = 1.0

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ValueError("; ".join(problems))

    def _problems(self) -> list[str]:
        problems = []
        if self.scoring not in get_args(Scoring):
            problems.append(f"experts are scored by {', '.join(get_args(Scoring))}, got {self.scoring!r}")
        if self.groups < 1 or self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            problems.append(
                f"experts lie in groups of equal size, of which some are taken, got {self.num_experts} experts in "
                f"{self.groups} groups, {self.top_groups} of them taken"
            )
        elif not 1 <= self.top_k <= self.num_experts // self.groups * self.top_groups:
            problems.append(
                f"a token takes 1 to {self.num_experts // self.groups * self.top_groups} of the experts that it may "
                f"choose from, got {self.top_k}"
            )
        return problems

    def __call__(self, logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits fp32 [T, E] and bias fp32 [E]; weights fp32 [T, k] and experts int64 [T, k]."""
        scores = self._scores(logits)
        experts = self._allowed(scores + bias).topk(self.top_k, -1).indices
        weights = scores.gather(1, experts)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scoring == "sigmoid":
            return logits.sigmoid()
        if self.scoring == "softmax":
            return logits.softmax(-1)
        return F.softplus(logits).sqrt()

    def _allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """-inf outside each token's best groups."""
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(self.top_groups, -1).indices
        taken = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, True)
        allowed: torch.Tensor = grouped.masked_fill(~taken[..., None], float("-inf")).flatten(1)
        return allowed


def limited_swiglu(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) for gate_up [T, 2 I], gate first; [T, I]. May reuse gate_up."""
    if limit is not None:
        gate, up = gate_up.chunk(2, -1)
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
    return swiglu(gate_up)


class FeedForward(nn.Module):
    """down(swiglu(gate_up(x))): gate_up [2 I, H], gate first, and down [H, I]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, limit: float | None = None) -> None:
        super().__init__()
        self.gate_up, self.down = frozen(gate_up), frozen(down)
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H]; [T, H]."""
        return linear(limited_swiglu(linear(x, self.gate_up), self.limit), self.down)


class Experts(nn.Module):
    """Many feed-forwards, of which each token takes a few: gate_up [E, 2 I, H] and down [E, H, I]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, limit: float | None = None) -> None:
        super().__init__()
        self.gate_up, self.down = frozen(gate_up), frozen(down)
        self.limit = limit

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [T, H], weights fp32 [T, k], experts int64 [T, k]; fp32 [T, H]: the weighted sum of k feed-forwards.

        A decode of T tokens reads the weights of at most min(E, k T) experts: memory traffic grows with T until all
        experts have a row, and then no more.
        """
        chosen, order = experts.flatten().sort(stable=True)
        every = torch.arange(self.gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        inner = grouped_linear(x[order // experts.shape[1]], self.gate_up, ends)
        rows = grouped_linear(limited_swiglu(inner, self.limit), self.down, ends)
        placed = torch.empty_like(rows).index_copy_(0, order, rows).view(*experts.shape, -1)
        return torch.bmm(weights[:, None], placed.float())[:, 0]


class MixtureOfExperts(nn.Module):
    """Routed experts beside one that every token takes: router fp32 [E, H] with bias fp32 [E]."""

    def __init__(
        self,
        routing: Routing,
        router: torch.Tensor,
        bias: torch.Tensor,
        experts: Experts,
        shared: FeedForward | None,
    ) -> None:
        super().__init__()
        self.routing = routing
        self.router, self.bias = frozen(router), frozen(bias)
        self.experts, self.shared = experts, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H]; [T, H]."""
        # In fp32: two experts with almost equal scores would change places with the rounding of a narrower product.
        weights, experts = self.routing(F.linear(x.float(), self.router), self.bias)
        out: torch.Tensor = self.experts(x, weights, experts)
        if self.shared is not None:
            out = out + self.shared(x)
        return out.to(x.dtype)
