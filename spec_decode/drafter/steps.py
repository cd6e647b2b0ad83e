"""What the steps of a round compute: the device work of step 0 and of a later step, over buffers that never move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from builders import RequestTables, begin_decode, begin_extend
from builders.errors import require_tensor
from spec_decode.drafter.attention import PagedAttention
from spec_decode.drafter.kernels.gather_last_hidden import gather_last_hidden
from spec_decode.drafter.kernels.shift_tokens import shift_tokens
from spec_decode.drafter.kv_groups import KVGroup
from spec_decode.drafter.step_buffers import StepBuffers
from spec_decode.models import DraftModel
from spec_decode.models.attention import Attention
from spec_decode.sampling import DraftSampler


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedTokens:
    """What a round starts from, for n live requests in the order of the tables; all on the drafter's device.

    token_ids      int64 [n, 1 + K]      the tokens the target just ran over
    target_hidden_states [n, 1 + K, F]   what the draft reads of the target there
    context_lens   int32 [n]             draft KV tokens committed before them: the position of the first
    accepted       int32 [n]             how many of the K draft tokens were kept, 0 to K
    next_tokens    int64 [n]             the target's own token behind the last kept one
    temperature    fp32 [n]              0 is greedy
    seeds          int64 [n]
    draft_lens     int32 [n]             draft tokens wanted of each, 0 to K; None: K of each. With 0 a request takes
                                         part in step 0 alone, so that its verified tokens reach the draft's KV cache
    """

    token_ids: torch.Tensor
    target_hidden_states: torch.Tensor
    context_lens: torch.Tensor
    accepted: torch.Tensor
    next_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_lens: torch.Tensor | None = None


class DraftSteps:
    """Step 0 and a later step of a draft model, with a phase each: the same kernels whether eager or captured.

    inputs     VerifiedTokens, of all rows R of the tables
    sampler    DraftSampler, which holds the draft tokens and logits
    hidden     [R, hidden], what a later step starts from
    """

    def __init__(
        self,
        model: DraftModel,
        groups: Sequence[KVGroup],
        tables: RequestTables,
        *,
        num_speculative_tokens: int,
        planned: Sequence[int],
        min_confidence: float,
    ) -> None:
        """planned: groups whose metadata is built for each later step before the first."""
        self.model = model
        self.groups = tuple(groups)
        self.tables = tables
        self.num_speculative_tokens = num_speculative_tokens
        self.extend = StepBuffers(groups, tables, query_len=num_speculative_tokens + 1, horizon=0)
        self.decode = StepBuffers(groups, tables, query_len=1, horizon=num_speculative_tokens - 1, planned=planned)
        batch = self.decode.batch
        self.sampler = DraftSampler(
            batch.seq_lens,
            batch.positions,
            batch.step,
            num_speculative_tokens=num_speculative_tokens,
            vocab_size=model.vocab_size,
            token_map=model.token_map,
            min_confidence=min_confidence,
        )
        self._allocate(groups[0].spec.dtype)

    def _allocate(self, hidden_dtype: torch.dtype) -> None:
        reqs, steps, model = self.tables.max_reqs, self.num_speculative_tokens, self.model

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.tables.device)

        self.inputs = VerifiedTokens(
            token_ids=zeros(reqs, 1 + steps, dtype=torch.int64),
            target_hidden_states=zeros(reqs, 1 + steps, model.target_states_size, dtype=hidden_dtype),
            context_lens=zeros(reqs, dtype=torch.int32),
            accepted=zeros(reqs, dtype=torch.int32),
            next_tokens=zeros(reqs, dtype=torch.int64),
            temperature=self.sampler.temperature,
            seeds=self.sampler.seeds,
            draft_lens=self.sampler.draft_lens,
        )
        self.hidden = zeros(reqs, model.hidden_size, dtype=hidden_dtype)

    def take(self, verified: VerifiedTokens, live: int) -> None:
        """Check every tensor of `live` requests, then copy them all to the inputs; BatchError, with nothing copied."""
        given = [name for name in VerifiedTokens.__slots__ if getattr(verified, name) is not None]
        for name in given:
            found, buffer = getattr(verified, name), getattr(self.inputs, name)
            shape = (live, *buffer.shape[1:])
            # Compared here first: composing the message's parts for eight tensors would cost 10 us a round.
            if found.shape != shape or found.dtype != buffer.dtype or found.device != buffer.device:
                require_tensor(name, found, shape=shape, dtype=buffer.dtype, device=self.tables.device)
        buffers = [getattr(self.inputs, name)[:live] for name in given]
        torch._foreach_copy_(buffers, [getattr(verified, name) for name in given], non_blocking=True)

    def begin_extend(self, size: int) -> None:
        """Set the shared state of step 0 for `size` rows from the round's inputs."""
        begin_extend(self.extend.batch, self.inputs.context_lens, size, self.extend.query_len)

    def extend_forward(self, size: int) -> None:
        """Step 0: the draft's tokens are the target's, shifted by one, with the next token behind the last kept."""
        inputs, query_len = self.inputs, self.extend.query_len
        hidden = self.model.forward(
            shift_tokens(inputs.token_ids[:size], inputs.next_tokens, inputs.accepted),
            self.model.combine(inputs.target_hidden_states[:size].flatten(0, 1)),
            self.extend.batch.positions[: size * query_len],
            PagedAttention(self.groups, self.extend.metadata),
        )
        begin_decode(self.decode.batch, self.extend.batch.seq_lens, inputs.accepted, size, query_len)
        gather_last_hidden(hidden, inputs.accepted, query_len, self.hidden[:size])
        self.sampler(self.model.logits(self.hidden[:size]))

    def step_forward(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        """A single-token step from the last one's hidden states; returns its own."""
        hidden = self._forward(size, hidden, attention)
        self.sampler(self.model.logits(hidden))
        return hidden

    def step_in_place(self, size: int, attention: Attention) -> None:
        """A single-token step that leaves its hidden states where the next one, the same work, finds them."""
        hidden = self._forward(size, self.hidden[:size], attention)
        self.sampler(self.model.logits(hidden), hidden, self.hidden)

    def _forward(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        return self.model.forward(self.sampler.next_ids[:size], hidden, self.decode.batch.positions[:size], attention)
