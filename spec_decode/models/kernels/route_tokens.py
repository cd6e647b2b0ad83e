"""Choose each token's experts and their weights from the router's logits, in one kernel.

Legend: T tokens, E experts in G groups of equal size, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.batch_invariance import by_row
from builders.errors import require_tensor
from builders.kernels.op import define_op
from builders.kernels.sizes import next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton

Scoring = Literal["sigmoid", "softmax", "sqrtsoftplus"]

EPS = 1e-20
"""Added to the sum that weights are divided by, which can be 0."""

MAX_EXPERTS = 4096
"""The most experts that one program holds in registers, with the group count and the group size each rounded up to a
power of two. torch routes among more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How experts are chosen for a token and weighted (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    A learned bias affects the choice but not the weights. The experts form `groups` of equal size, and only those in
    the top_groups best groups can be chosen; the score of a group is the sum of its two best experts'. Ties between
    experts, and between groups, go to the first.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "sigmoid"
    groups: int = 1
    top_groups: int = 1
    normalised: bool = True
    """Whether a token's weights are normalised to sum to 1 before they are scaled."""
    scale: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if self.scoring not in get_args(Scoring):
            problems.append(f"scoring must be one of {', '.join(get_args(Scoring))}, got {self.scoring!r}")
        if self.groups < 1 or self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            problems.append(
                f"groups must divide num_experts, and top_groups be 1 to groups, got {self.num_experts} experts in "
                f"{self.groups} groups and top_groups {self.top_groups}"
            )
        else:
            most = self.num_experts // self.groups * self.top_groups
            if not 1 <= self.top_k <= most:
                problems.append(f"top_k must be 1 to {most}, the experts of the top groups, got {self.top_k}")
        if problems:
            raise ValueError("; ".join(problems))


def route_tokens(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing, logit_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights fp32 [T, k] and experts int64 [T, k], best first.

    logits      fp32 [T, E]
    bias        fp32 [E], of the choice
    logit_bias  fp32 [E], added to the logits, or None

    Experts are ranked by score plus bias. Ties between experts, and between groups, go to the lowest index; NaN ranks
    best, so a row of NaN has NaN weights, and its experts are still in 0..E-1. Raises BatchError for another shape,
    dtype or device, before any launch.
    """
    require_tensor("logits", logits, shape=(None, None), dtype=torch.float32, device=logits.device)
    require_tensor("bias", bias, shape=logits.shape[1:], dtype=torch.float32, device=logits.device)
    if logit_bias is not None:
        require_tensor("logit_bias", logit_bias, shape=logits.shape[1:], dtype=torch.float32, device=logits.device)
        logit_bias = logit_bias.contiguous()
    r = routing
    arguments = RouteTokens(
        logits=logits.contiguous(),
        bias=bias.contiguous(),
        top_k=r.top_k,
        scoring=r.scoring,
        groups=r.groups,
        top_groups=r.top_groups,
        normalised=r.normalised,
        scale=r.scale,
        logit_bias=logit_bias,
    )
    weights, experts = _route_tokens(*arguments)
    return weights, experts


class RouteTokens(NamedTuple):
    """logits fp32 [T, E], bias and logit_bias fp32 [E], contiguous; the other fields are those of a `Routing`, already
    validated.

    Returns weights fp32 [T, k] and experts int64 [T, k].
    """

    logits: torch.Tensor
    bias: torch.Tensor
    top_k: int
    scoring: str
    groups: int
    top_groups: int
    normalised: bool
    scale: float
    logit_bias: torch.Tensor | None = None

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = by_row(self._routed, self.logits)
        return weights, experts

    def _routed(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = _scores(logits if self.logit_bias is None else logits + self.logit_bias, self.scoring)
        experts = _best(_among_best_groups(scores + self.bias, self.groups, self.top_groups), self.top_k)
        weights = scores.gather(1, experts)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        return weights * self.scale, experts

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.logits.shape[0], self.top_k)
        return self.logits.new_empty(shape), self.logits.new_empty(shape, dtype=torch.int64)

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.logits.shape[1] // self.groups
        block_g, block_s = next_power_of_2(self.groups), next_power_of_2(size)
        if block_g * block_s > MAX_EXPERTS:
            return self.reference()
        weights, experts = self.fake()
        _route_kernel[(self.logits.shape[0],)](
            logits_ptr=self.logits,
            bias_ptr=self.bias,
            logit_bias_ptr=self.logit_bias,
            topk_weights_ptr=weights,
            topk_ids_ptr=experts,
            scale=self.scale,
            TOP_K=self.top_k,
            SCORING=self.scoring,
            GROUPS=self.groups,
            GROUP_SIZE=size,
            TOP_GROUPS=self.top_groups,
            NORMALISED=self.normalised,
            EPS=EPS,
            BLOCK_G=block_g,
            BLOCK_S=block_s,
            num_warps=1 if block_g * block_s <= 512 else 4,
            **dependent_launch(weights.device),
        )
        return weights, experts


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "sigmoid":
        return logits.sigmoid()
    if scoring == "softmax":
        return logits.softmax(-1)
    return F.softplus(logits).sqrt()


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest values; topk does not define the order of ties."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _among_best_groups(choice: torch.Tensor, groups: int, top_groups: int) -> torch.Tensor:
    """Set choices outside each token's best groups to -inf; a group's score is the sum of its two best experts'."""
    if groups == 1:
        return choice
    grouped = choice.unflatten(-1, (groups, -1))
    best = _best(grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1), top_groups)
    taken = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter(1, best, True)
    allowed: torch.Tensor = grouped.masked_fill(~taken[..., None], float("-inf")).flatten(1)
    return allowed


@triton.jit
def _route_kernel(
    logits_ptr,  # fp32 [T, E]
    bias_ptr,  # fp32 [E]
    logit_bias_ptr,  # fp32 [E], or None
    topk_weights_ptr,  # out: fp32 [T, k]
    topk_ids_ptr,  # out: int64 [T, k]
    scale,  # of the weights
    TOP_K: tl.constexpr,  # k
    SCORING: tl.constexpr,  # "sigmoid", "softmax" or "sqrtsoftplus"
    GROUPS: tl.constexpr,  # G
    GROUP_SIZE: tl.constexpr,  # E / G
    TOP_GROUPS: tl.constexpr,  # groups to choose from
    NORMALISED: tl.constexpr,  # make the weights sum to 1
    EPS: tl.constexpr,  # added to their sum
    BLOCK_G: tl.constexpr,  # G, rounded up to a power of two
    BLOCK_S: tl.constexpr,  # E / G, rounded up to a power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """The top k of score(logits) + bias among the best groups, and their scores as weights.

    One program per token, with its experts in a tile [groups, members].
    """
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    # 1. Scores, and the values to choose by: with the bias, and only in the best groups
    offs_g = tl.arange(0, BLOCK_G)
    offs_s = tl.arange(0, BLOCK_S)
    mask = (offs_g < GROUPS)[:, None] & (offs_s < GROUP_SIZE)[None, :]
    # Padding gets an index that no expert has: its position would give an expert of the next group.
    expert = tl.where(mask, offs_g[:, None] * GROUP_SIZE + offs_s[None, :], GROUPS * GROUP_SIZE)
    logits = tl.load(logits_ptr + token * GROUPS * GROUP_SIZE + expert, mask=mask, other=float("-inf"))
    if logit_bias_ptr is not None:
        logits += tl.load(logit_bias_ptr + expert, mask=mask, other=0.0)
    scores = _triton_scores(logits, SCORING)
    choice = _nan_as_best(scores + tl.load(bias_ptr + expert, mask=mask, other=0.0))
    if GROUPS > 1:
        taken = _best_groups(tl.where(mask, choice, float("-inf")), offs_g, GROUPS, GROUP_SIZE, TOP_GROUPS)
        choice = tl.where(taken[:, None], choice, float("-inf"))

    # 2. The best experts, one after another; rank is TOP_K for unchosen ones
    rank = tl.full([BLOCK_G, BLOCK_S], TOP_K, tl.int32)
    for k in range(TOP_K):
        rank = tl.where(expert == _first_best(choice, mask & (rank == TOP_K), expert), k, rank)
    # 3. Their weights
    is_chosen = rank < TOP_K
    if NORMALISED:
        scores = scores / (tl.sum(tl.where(is_chosen, scores, 0.0)) + EPS)
    tl.store(topk_weights_ptr + token * TOP_K + rank, scores * scale, mask=is_chosen)
    tl.store(topk_ids_ptr + token * TOP_K + rank, expert.to(tl.int64), mask=is_chosen)


@triton.jit
def _triton_scores(
    logits,  # fp32 [groups, members], -inf for padding
    SCORING: tl.constexpr,
):
    """Compute a token's scores, as `_scores` does."""
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORING == "softmax":
        exps = tl.exp(logits - tl.max(logits))
        scores = exps / tl.sum(exps)
    else:
        # log(1 + p) from the rounded sum s: log(s) p / (s - 1) is accurate where log(s) alone has lost p's digits.
        p = tl.exp(-tl.abs(logits))
        sum_1p = 1.0 + p
        p_kept = sum_1p - 1.0
        log1p = tl.where(p_kept == 0.0, p, tl.log(sum_1p) * p / tl.where(p_kept == 0.0, 1.0, p_kept))
        scores = tl.sqrt(tl.where(logits > 0.0, logits, 0.0) + log1p)
    return scores


@triton.jit
def _best_groups(
    choice,  # fp32 [groups, members], -inf for padding
    offs_g,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """Return whether each group is among a token's best."""
    group_score = tl.max(choice, 1)
    if GROUP_SIZE > 1:
        offs_s = tl.arange(0, choice.shape[1])
        others = tl.where(offs_s[None, :] == tl.argmax(choice, 1)[:, None], float("-inf"), choice)
        group_score = _nan_as_best(group_score + tl.max(others, 1))
    taken = offs_g < 0
    for _ in range(TOP_GROUPS):
        taken |= offs_g == _first_best(group_score, (offs_g < GROUPS) & ~taken, offs_g)
    return taken


@triton.jit
def _nan_as_best(values):
    """Replace NaN with +inf; torch sorts NaN first, too."""
    return tl.where(values == values, values, float("inf"))


@triton.jit
def _first_best(values, left, index):
    """Return the lowest index of the largest remaining value; none of them is NaN."""
    INT32_MAX: tl.constexpr = 2**31 - 1
    best = tl.max(tl.where(left, values, float("-inf")))
    return tl.min(tl.where(left & (values == best), index, INT32_MAX))


_route_tokens = define_op("spec_decode::route_tokens", RouteTokens)
