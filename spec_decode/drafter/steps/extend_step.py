"""What step 0 of every kind of draft has: the round's inputs, buffers of its shape, and a state to begin from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from builders import CaptureConstants, RequestTables
from builders.errors import require
from spec_decode.drafter.kernels.gather_last_hidden import gather_last_hidden
from spec_decode.drafter.kernels.shift_tokens import shift_tokens
from spec_decode.drafter.verified_tokens import VerifiedTokens
from spec_decode.models import DraftModel
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import KVGroup, build_ragged, products_of
from spec_decode.paged.step_buffers import StepBuffers
from spec_decode.sampling import DraftSampler
from spec_decode.sampling.draft_settings import DraftSettings

S = TypeVar("S", bound=DraftSettings)


class ExtendStep(ABC, Generic[S]):
    """Step 0 of a round, over buffers that never move: the same kernels eager or captured.

    inputs     VerifiedTokens, of all rows R of the tables
    extend     StepBuffers of the step
    sampler    which holds what was drafted
    products   makes the context in which the model runs
    """

    def __init__(
        self,
        model: DraftModel,
        groups: Sequence[KVGroup],
        *,
        num_speculative_tokens: int,
        extend: StepBuffers,
        sampler: S,
    ) -> None:
        self.model = model
        self.groups = tuple(groups)
        self.products = products_of(model, groups)
        self.extend = extend
        self.sampler = sampler
        self.num_speculative_tokens = num_speculative_tokens
        self.inputs = VerifiedTokens.allocate(
            sampler, extend.batch.max_reqs, num_speculative_tokens, model.target_states_size, groups[0].spec.dtype
        )

    @staticmethod
    def places(num_speculative_tokens: int) -> int:
        """Tokens of a row of step 0: the 1 + K verified ones."""
        return 1 + num_speculative_tokens

    def prefill(
        self,
        tables: RequestTables,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        token_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
    ) -> None:
        """Write the draft KV of prompts or parts of them: see Drafter.prefill.

        token_ids int64 [T], target_hidden_states [T, F] in the dtype of `inputs`. Raises BatchError, with nothing
        written, for lengths that the tables do not hold.
        """
        batch, metadata = build_ragged(self.groups, tables, query_lens, seq_lens)
        with self.products():
            states = self.model.combine(target_hidden_states)
            self.write_prompt(token_ids, states, batch.positions, PagedAttention(self.groups, metadata))

    def write_prompt(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: PagedAttention
    ) -> None:
        """Write the KV of T tokens; token_ids, positions int64 [T], states [T, H] as `combine` makes them."""
        self.model.forward(token_ids, states, positions, attention)

    def begin(self, size: int) -> None:
        """Set the state of the step for the first `size` rows, and build what the host builds of it."""
        self.extend.begin(self.inputs.context_lens, size)

    def begin_in_graph(self, size: int) -> None:
        """What a graph holds of it."""
        self.extend.begin_in_graph(self.inputs.context_lens, size)

    def prepare_capture(self, size: int) -> CaptureConstants:
        """The host constants that a capture of `size` rows bakes in."""
        return self.extend.prepare_capture(size)

    @abstractmethod
    def run_extend(self, size: int) -> None:
        """The step of the first `size` rows. Raises BatchError for a draft model that returns states of another
        shape."""

    def forward(
        self, size: int, token_ids: torch.Tensor, states: torch.Tensor, module: DraftModel | None = None
    ) -> torch.Tensor:
        """States of all tokens of the step by one of the model's modules, or the model itself.

        token_ids int64 [T] and the states [T, H] that it reads of each. Raises BatchError for a draft model that
        returns states of another shape.
        """
        model = self.model if module is None else module
        query_len, width = self.extend.query_len, model.hidden_size
        positions = self.extend.batch.positions[: size * query_len]
        with self.products():
            hidden = model.forward(token_ids, states, positions, self.extend.attention)
        require(
            hidden.shape == (size * query_len, width),
            f"{size} rows of {query_len} tokens need states [{size * query_len}, {width}], got {list(hidden.shape)}; "
            "no token was drafted. Have the draft model return a state of its hidden_size for every token.",
        )
        return hidden

    def forward_last(self, size: int) -> torch.Tensor:
        """The model's states [size, H] of each row's last accepted token, from `shifted`.

        Raises BatchError as `forward` does.
        """
        query_len, width, accepted = self.extend.query_len, self.model.hidden_size, self.inputs.accepted

        def keep(each: torch.Tensor) -> torch.Tensor:
            last = each.new_empty(size, *each.shape[1:])
            gather_last_hidden(each.flatten(1), accepted, last.flatten(1), query_len)
            return last

        positions = self.extend.batch.positions[: size * query_len]
        with self.products():
            hidden = self.model.forward_kept(*self.shifted(size), positions, self.extend.attention, keep)
        require(
            hidden.shape == (size, width),
            f"the last tokens of {size} rows need states [{size}, {width}], got {list(hidden.shape)}; no token was "
            "drafted. Have the draft model return a state of its hidden_size for every token that is kept.",
        )
        return hidden

    def shifted(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's tokens, shifted by one, with the next token after the last accepted, int64 [T], and the states
        [T, H] that the model reads of each."""
        inputs = self.inputs
        token_ids = shift_tokens(inputs.token_ids[:size], inputs.next_tokens, inputs.accepted)
        with self.products():
            return token_ids, self.model.combine(inputs.target_hidden_states[:size].flatten(0, 1))

    def logits(self, hidden: torch.Tensor, module: DraftModel | None = None) -> torch.Tensor:
        """Logits [T, V of the draft] of hidden [T, H] by one of the model's modules, or the model itself."""
        with self.products():
            return (self.model if module is None else module).logits(hidden)


def make_sampler(
    model: DraftModel,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    step: torch.Tensor,
    *,
    num_speculative_tokens: int,
    min_confidence: float,
) -> DraftSampler:
    """A draft model's sampler over the tensors of a batch: see DraftSampler."""
    return DraftSampler(
        seq_lens,
        positions,
        step,
        num_speculative_tokens=num_speculative_tokens,
        vocab_size=model.vocab_size,
        token_map=model.token_map,
        min_confidence=min_confidence,
    )
