"""The arguments of the verification ops."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.errors import require, require_tensor


class VerifyArguments(NamedTuple):
    """The arguments of an op that returns how many draft tokens are accepted, int64 [R], and the next token, int64 [R].

    No draft token is accepted at a column whose logits in `processed` define no distribution (a NaN or +inf among them,
    or nothing but -inf), and the token drawn there is NO_TOKEN.

    R rows, K draft tokens, V vocabulary, p the target's distributions, q the draft's:

    - processed        fp32 [R, 1 + K, V], p's logits after temperature, top_k and top_p
    - draft_tokens     int64 [R, K]; the first negative one ends a row's draft, and nothing after it is read. One past
                       the vocabulary has probability 0 in both models and is rejected
    - draft_logits     fp32 [R, K, V], any strides, q's processed logits
    - temperature      fp32 [R]; 0 is greedy
    - seeds            int64 [R], for the target's draws
    - accept_seeds     int64 [R], for the accept uniforms
    - draft_positions  int64 [R], absolute position of draft token 0
    """

    processed: torch.Tensor
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    accept_seeds: torch.Tensor
    draft_positions: torch.Tensor

    def checked(self) -> VerifyArguments:
        """Return these arguments, contiguous as kernels need them, except draft_logits, which are too large to copy.

        Raises BatchError for tensors of the wrong shape, dtype or device, and for drafts without columns.
        """
        vocab, device = self.processed.shape[-1], self.processed.device
        require_tensor("draft_tokens", self.draft_tokens, shape=(None, None), dtype=torch.int64, device=device)
        rows, columns = self.draft_tokens.shape
        require(
            columns > 0,
            "draft_tokens must have at least one column, got [R, 0]. Without drafts, draw the target's token with "
            "sample_target.",
        )
        expected: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
            ((rows, columns + 1, vocab), torch.float32),
            ((rows, columns), torch.int64),
            ((rows, columns, vocab), torch.float32),
            ((rows,), torch.float32),
            *[((rows,), torch.int64)] * 3,
        )
        for name, tensor, (shape, dtype) in zip(self._fields, self, expected, strict=True):
            require_tensor(name, tensor, shape=shape, dtype=dtype, device=device)
        return VerifyArguments(*(x if x is self.draft_logits else x.contiguous() for x in self))

    def fake(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(self.draft_positions), torch.empty_like(self.draft_positions)
