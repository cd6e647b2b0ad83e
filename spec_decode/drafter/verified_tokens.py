"""What a round of drafting starts from."""

from __future__ import annotations

from typing import NamedTuple

import torch


class VerifiedTokens(NamedTuple):
    """What a round starts from, for n live requests in the order of the tables; all on the drafter's device.

    token_ids             int64 [n, 1 + K]   the tokens that the target just ran over
    target_hidden_states  [n, 1 + K, F]      what the draft reads of the target at these tokens
    context_lens          int32 [n]          draft KV tokens committed before them: the position of the first
    accepted              int32 [n]          how many of the K draft tokens were accepted, 0 to K
    next_tokens           int64 [n]          the target's own token after the last accepted one
    temperature           fp32 [n]           0 is greedy
    seeds                 int64 [n]
    draft_lens            int32 [n]          draft tokens wanted of each, 0 to K; None: K of each. A request with 0
                                             takes part in step 0 only: its verified tokens reach the draft's cache
    """

    token_ids: torch.Tensor
    target_hidden_states: torch.Tensor
    context_lens: torch.Tensor
    accepted: torch.Tensor
    next_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_lens: torch.Tensor | None = None
