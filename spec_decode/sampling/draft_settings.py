"""What each request asks of a round's drafts, and what was drafted, on the device."""

from __future__ import annotations

import torch


class DraftSettings:
    """Buffers of R rows that keep their addresses: whoever drafts reads them at every step, the caller fills them.

    - temperature  fp32 [R]   0 is greedy
    - seeds        int64 [R]
    - draft_lens   int32 [R]  tokens that a row proposes one after the other; below 1 none, above K as many as K
    - num_tokens   int32 [1]  the most that any row so proposes

    Outputs that every sampler has: draft_tokens and draft_logits, with trees their parents, and

    - continue_flag  int32 [1]  1 if some row drafts on, else 0
    """

    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor
    parents: torch.Tensor | None = None

    def __init__(self, rows: int, num_speculative_tokens: int, device: torch.device) -> None:
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draft_lens = torch.full((rows,), num_speculative_tokens, dtype=torch.int32, device=device)
        self.num_tokens = torch.full((1,), num_speculative_tokens, dtype=torch.int32, device=device)
        self.continue_flag = torch.zeros(1, dtype=torch.int32, device=device)
