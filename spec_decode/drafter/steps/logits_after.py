"""The logits of each place of a block, given the tokens of the place before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from spec_decode.model_api import CandidateTable, TokenBias
from spec_decode.trees.kernels.top_children import top_children

PlaceLogits: TypeAlias = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Takes a place of the block and the tokens before it, int64 [rows, F]; returns the logits after each [rows, F, C], and
the tokens that they score, int64 [rows, C]; None: the draft's vocabulary."""


def logits_after(
    rule: TokenBias | CandidateTable, logits: torch.Tensor, hidden: torch.Tensor, rows: int
) -> PlaceLogits:
    """Return the function for the logits of each place.

    logits  [rows * K, V], without what the tokens before change
    hidden  [rows * K, H], the states that they come from
    """
    if isinstance(rule, TokenBias):
        return _biased(rule, logits.unflatten(0, (rows, -1)))
    return _of_candidates(rule, logits, hidden, rows)


def _biased(rule: TokenBias, logits: torch.Tensor) -> PlaceLogits:
    def after(place: int, previous: torch.Tensor) -> tuple[torch.Tensor, None]:
        bias = rule.bias_after(previous.flatten()).unflatten(0, previous.shape)
        return logits[:, place, None] + bias, None

    return after


def _of_candidates(rule: CandidateTable, logits: torch.Tensor, hidden: torch.Tensor, rows: int) -> PlaceLogits:
    gates = rule.gates(hidden).unflatten(0, (rows, -1))
    candidates, _ = top_children(logits, rule.num_candidates, None)
    own = logits.gather(1, candidates).float().unflatten(0, (rows, -1))
    candidates = candidates.unflatten(0, (rows, -1))

    def after(place: int, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As in select_candidates; [rows, F, W, N] before the sum.
        context = rule.predecessors[previous].float() * gates[:, place, None].float()
        bias = (context[:, :, None] * rule.successors[candidates[:, place]].float()[:, None]).sum(-1)
        return own[:, place, None] + bias, candidates[:, place]

    return after
