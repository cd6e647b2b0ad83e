"""How the token at one place of a block changes the logits of the next.

Legend: T flat tokens, H hidden_size, V vocabulary, W candidates, N rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

Confidence: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenBias:
    """A token biases every logit of the next place.

    bias_after  takes tokens int64 [T]; returns the bias of the logits after each, [T, draft vocabulary]
    confidence  takes the states [T, H] that tokens were drafted from and the tokens before them, int64 [T]; returns the
                probability that the target accepts each, fp32 [T]. None: use the token's own probability
    """

    bias_after: Callable[[torch.Tensor], torch.Tensor]
    confidence: Confidence | None = None


@dataclass(frozen=True, slots=True)
class CandidateTable:
    """A place draws from its W likeliest tokens, and sum(predecessors[token before] * gates(state) *
    successors[candidate]) biases a candidate's logit. The logits cover the target's whole vocabulary.

    num_candidates            W
    predecessors, successors  [V, N]
    gates                     takes states [T, H]; returns [T, N]
    """

    num_candidates: int
    predecessors: torch.Tensor
    successors: torch.Tensor
    gates: Callable[[torch.Tensor], torch.Tensor]
