"""The inputs of a drafting round."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders import BatchError
from builders.errors import require, require_tensor
from spec_decode.sampling.draft_sampler import DraftSettings


class VerifiedTokens(NamedTuple):
    """The inputs of a round for n live requests, in the order of the tables; all on the drafter's device.

    token_ids             int64 [n, 1 + K]   the tokens that the target just ran over
    target_hidden_states  [n, 1 + K, F]      the target states that the draft reads at these tokens
    context_lens          int32 [n]          draft KV tokens committed before them: the position of the first
    accepted              int32 [n]          how many of the K draft tokens were accepted, 0 to K
    next_tokens           int64 [n]          the target's own token after the last accepted one
    temperature           fp32 [n]           0 is greedy
    seeds                 int64 [n]
    draft_lens            int32 [n]          draft tokens to propose, 0 to K; None: K for all. A request with 0 takes
                                             part in step 0 only, which writes its verified tokens to the draft's cache
    """

    token_ids: torch.Tensor
    target_hidden_states: torch.Tensor
    context_lens: torch.Tensor
    accepted: torch.Tensor
    next_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_lens: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, settings: DraftSettings, max_reqs: int, num_speculative_tokens: int, states_size: int, dtype: torch.dtype
    ) -> VerifiedTokens:
        """Allocate zeroed buffers for all rows; temperature, seeds and draft_lens alias those of the settings."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=settings.seeds.device)

        width = 1 + num_speculative_tokens
        return cls(
            token_ids=zeros(max_reqs, width, dtype=torch.int64),
            target_hidden_states=zeros(max_reqs, width, states_size, dtype=dtype),
            context_lens=zeros(max_reqs, dtype=torch.int32),
            accepted=zeros(max_reqs, dtype=torch.int32),
            next_tokens=zeros(max_reqs, dtype=torch.int64),
            temperature=settings.temperature,
            seeds=settings.seeds,
            draft_lens=settings.draft_lens,
        )

    def copy_from(self, verified: VerifiedTokens, live: int) -> None:
        """Copy the tensors of `live` requests into these buffers. Raises BatchError, with nothing copied, for anything
        but VerifiedTokens, for a missing tensor, and for one of the wrong shape, dtype or device."""
        require(
            isinstance(verified, VerifiedTokens),
            f"verified must be VerifiedTokens, got {type(verified).__name__}. Make one from your tensors, or pass None "
            "if they are in the drafter's inputs.",
        )
        buffers, given = [], []
        for name, buffer, tensor in zip(self._fields, self, verified, strict=True):
            if buffer is None or (tensor is None and name == "draft_lens"):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise BatchError(
                    f"{name} must be a tensor, got {type(tensor).__name__}; the round would start from stale values. "
                    "Pass it on the drafter's device."
                )
            buffers.append(buffer[:live])
            given.append(tensor)
            shape, dtype = buffers[-1].shape, buffer.dtype
            # Compare here first: building the parts of the message for eight tensors would cost 10 us a round.
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != buffer.device:
                require_tensor(name, tensor, shape=shape, dtype=dtype, device=self.token_ids.device)
        torch._foreach_copy_(buffers, given, non_blocking=True)
