"""The device work of step 0 and of a later step, over buffers that never move: the same kernels eager or captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from builders import BatchError, RequestTables, begin_decode
from builders.errors import require, require_tensor
from spec_decode.drafter.kernels.gather_last_hidden import gather_last_hidden
from spec_decode.drafter.kernels.shift_tokens import shift_tokens
from spec_decode.drafter.kv_groups import KVGroup, products_of
from spec_decode.drafter.metadata_plan import MetadataPlan
from spec_decode.drafter.step_buffers import StepBuffers
from spec_decode.drafter.verified_tokens import VerifiedTokens
from spec_decode.models import DraftModel
from spec_decode.models.attention import Attention
from spec_decode.sampling import DraftSampler


class DraftStep:
    """A draft model's step 0 and later steps, with the buffers of each shape.

    inputs     VerifiedTokens, of all rows R of the tables
    extend     StepBuffers of step 0, 1 + K tokens a row
    decode     StepBuffers of a later step, one token a row
    sampler    DraftSampler, which holds the draft tokens and logits
    hidden     [R, hidden_size], what the next later step starts from
    products   makes the context in which the model runs
    """

    def __init__(
        self,
        model: DraftModel,
        groups: Sequence[KVGroup],
        tables: RequestTables,
        *,
        num_speculative_tokens: int,
        min_confidence: float,
        extend_plan: MetadataPlan,
        decode_plan: MetadataPlan,
    ) -> None:
        self.model = model
        self.products = products_of(model, groups)
        self.groups = tuple(groups)
        self.tables = tables
        self.num_speculative_tokens = num_speculative_tokens
        self.extend = StepBuffers(groups, tables, extend_plan, query_len=num_speculative_tokens + 1)
        self.decode = StepBuffers(groups, tables, decode_plan, query_len=1, horizon=num_speculative_tokens - 1)
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
        reqs, steps, hidden_dtype = tables.max_reqs, num_speculative_tokens, groups[0].spec.dtype

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=tables.device)

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

    def copy_inputs(self, verified: VerifiedTokens, live: int) -> None:
        """Copy the tensors of `live` requests to the inputs. Raises BatchError, with nothing copied, for anything but
        VerifiedTokens, one of its tensors missing, and one of another shape, dtype or device."""
        require(
            isinstance(verified, VerifiedTokens),
            f"a round starts from VerifiedTokens, got {type(verified).__name__}; nothing was run. Make one of your "
            "tensors, or pass None where they are in the drafter's inputs.",
        )
        buffers, given = [], []
        for name, buffer, tensor in zip(verified._fields, self.inputs, verified, strict=True):
            if buffer is None or (tensor is None and name == "draft_lens"):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise BatchError(
                    f"{name} must be a tensor, got {type(tensor).__name__}; the round would start from an earlier "
                    "one's, so nothing was run. Pass it on the drafter's device."
                )
            buffers.append(buffer[:live])
            given.append(tensor)
            shape, dtype = buffers[-1].shape, buffer.dtype
            # Compared here first: composing the message's parts for eight tensors would cost 10 us a round.
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != buffer.device:
                require_tensor(name, tensor, shape=shape, dtype=dtype, device=self.tables.device)
        torch._foreach_copy_(buffers, given, non_blocking=True)

    def run_extend(self, size: int) -> None:
        """Step 0: the draft's tokens are the target's, shifted by one, with the next token after the last accepted.

        Raises BatchError for a draft model that returns states of another shape.
        """
        inputs, query_len, last = self.inputs, self.extend.query_len, self.hidden[:size]
        with self.products():
            hidden = self.model.forward(
                shift_tokens(inputs.token_ids[:size], inputs.next_tokens, inputs.accepted),
                self.model.combine(inputs.target_hidden_states[:size].flatten(0, 1)),
                self.extend.batch.positions[: size * query_len],
                self.extend.attention,
            )
        require(
            hidden.shape == (size * query_len, last.shape[1]),
            f"{size} rows of {query_len} tokens need states [{size * query_len}, {last.shape[1]}], got "
            f"{list(hidden.shape)}; no token was drafted. Have the draft model return a state of its hidden_size for "
            "every token.",
        )
        begin_decode(self.decode.batch, self.extend.batch.seq_lens, inputs.accepted, size, query_len)
        gather_last_hidden(hidden, inputs.accepted, last, query_len)
        self.sampler(self._logits(last))

    def run_decode(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        """A later step from the last one's hidden states [size, hidden_size]; returns its own, of the same shape."""
        hidden = self._forward(size, hidden, attention)
        self.sampler(self._logits(hidden))
        return hidden

    def run_decode_in_place(self, size: int, attention: Attention) -> None:
        """A later step that leaves its hidden states in `hidden`, where the next one starts from."""
        hidden = self._forward(size, self.hidden[:size], attention)
        self.sampler(self._logits(hidden), hidden, self.hidden)

    def _forward(self, size: int, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        positions = self.decode.batch.positions[:size]
        with self.products():
            return self.model.forward(self.sampler.next_ids[:size], hidden, positions, attention)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self.products():
            return self.model.logits(hidden)
