"""The base of every step 0: the round's inputs, the step's buffers, and the sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from builders import BatchBuffers, BatchError, CaptureConstants, GraphSupport, RequestTables
from builders.errors import require
from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.kernels.gather_accepted import GatherAccepted, gather_accepted
from spec_decode.drafter.kernels.shift_tokens import shift_tokens
from spec_decode.drafter.plan import DraftPlan
from spec_decode.drafter.strategies.base import LaterSteps
from spec_decode.drafter.tree_sampler import BlockTreeSampler, TreeSampler
from spec_decode.drafter.verified_tokens import VerifiedTokens
from spec_decode.graphs import Capturable
from spec_decode.model_api import DraftInputs, DraftModel
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import KVGroup, build_ragged, products_of
from spec_decode.paged.metadata_plan import GraphMode, plan_uniform_step
from spec_decode.paged.step_metadata import StepBuffers
from spec_decode.sampling import DraftSampler
from spec_decode.sampling.draft_sampler import DraftSettings

M = TypeVar("M", bound=DraftModel)
S = TypeVar("S", bound=DraftSettings)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Views of the drafter's buffers, valid until the next round, with a column for each token of the round.

    tokens    int64 [n, K]     -1 where a request proposes nothing
    logits    fp32 [n, K, V]   the processed logits that each token was drawn from; undefined after a request's last
    parents   None; for trees  int64 [n, N], in the format of TreeBatch: then tokens are [n, N] and logits [n, 0, V]
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    parents: torch.Tensor | None = None


class Step(ABC, Generic[M, S]):
    """Step 0 of a round, over buffers that never move: the same kernels eager or captured.

    shape      the places that a round takes
    inputs     VerifiedTokens for all R rows of the tables
    step_0     StepBuffers of the step
    captured   whether a graph holds the step; if not, uncaptured_reason says why
    sampler    holds the drafted tokens
    products   makes the context manager that the model runs in
    """

    def __init__(
        self, model: M, groups: Sequence[KVGroup], tables: RequestTables, config: DrafterConfig, plan: DraftPlan
    ) -> None:
        """plan: for these groups. Raises BatchError, before any allocation, for tables without room for a round."""
        self.model = model
        self.groups = tuple(groups)
        self.config = config
        self.num_speculative_tokens = config.num_speculative_tokens
        self.shape = model.round_shape(config.num_speculative_tokens, config.tree)
        require(
            self.shape.places <= tables.max_seq_len,
            f"a round of K = {self.num_speculative_tokens} draft tokens needs {self.shape.places} places per request, "
            f"the tables have {tables.max_seq_len}; no request could draft. Lower K or enlarge the tables.",
        )
        self.products = products_of(model, groups)
        facts = [group.facts for group in plan.groups]
        self.uncaptured_reason = self._uncaptured_reason(plan)
        self.captured = self.uncaptured_reason is None
        mode = GraphMode.FULL if self.captured else GraphMode.NONE
        self._step_0_plan = plan_uniform_step(facts, self.shape.places, mode)
        self.step_0 = StepBuffers(groups, tables, self._step_0_plan, query_len=self.shape.step_0_len)
        self.sampler = self._allocate(tables, plan)
        self.inputs = VerifiedTokens.allocate(
            self.sampler, tables.max_reqs, self.num_speculative_tokens, model.target_states_size, groups[0].spec.dtype
        )

    def _uncaptured_reason(self, plan: DraftPlan) -> str | None:
        if not plan.strategy.implementation.uses_graphs:
            return f"the draft's strategy is {plan.strategy.value}, which uses no graphs"
        if not self.config.step_0_in_graph:
            return "the draft's step 0 runs without a graph: step_0_in_graph is off"
        unable = [group.facts for group in plan.groups if group.facts.graph_support < GraphSupport.UNIFORM_BATCH]
        return f"{unable[0].describe()} cannot capture step 0, with several tokens per request" if unable else None

    @property
    def later(self) -> LaterSteps | None:
        """The later steps; None if every token comes from step 0."""
        return None

    @abstractmethod
    def _allocate(self, tables: RequestTables, plan: DraftPlan) -> S:
        """Allocate what this kind of draft needs in addition to `step_0`; return its sampler."""

    @property
    def _drafted(self) -> dict[str, Any]:
        """The arguments that describe the draft to every sampler: see DraftSampler."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "vocab_size": self.model.vocab_size,
            "token_map": self.model.token_map,
        }

    def _draft_sampler(self, batch: BatchBuffers, num_candidates: int | None = None) -> DraftSampler:
        """Make a sampler over the tensors of a batch: see DraftSampler."""
        return DraftSampler(
            batch.seq_lens,
            batch.positions,
            batch.step,
            min_confidence=self.config.min_confidence,
            num_candidates=num_candidates,
            **self._drafted,
        )

    def _block_sampler(self) -> DraftSampler | BlockTreeSampler:
        """Make a sampler of blocks over the step's batch: of chains, or of the config's tree."""
        batch = self.step_0.batch
        if self.config.tree is None:
            return self._draft_sampler(batch)
        return BlockTreeSampler(self.config.tree, batch.seq_lens, **self._drafted)

    def _tree_sampler(self, batch: BatchBuffers) -> TreeSampler:
        """Make a sampler that grows the config's tree, over the tensors of a batch: see TreeSampler."""
        assert self.config.tree is not None
        return TreeSampler(self.config.tree, batch.step, batch.seq_lens, **self._drafted)

    def drafts(self, num_reqs: int, num_tokens: int) -> Drafts:
        """Return the last round's proposals, at most num_tokens in sequence: whole trees, which are no deeper."""
        sampler = self.sampler
        if sampler.parents is not None:
            return Drafts(sampler.draft_tokens[:num_reqs], sampler.draft_logits[:num_reqs], sampler.parents[:num_reqs])
        return Drafts(sampler.draft_tokens[:num_reqs, :num_tokens], sampler.draft_logits[:num_reqs, :num_tokens])

    def prefill(
        self,
        tables: RequestTables,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        token_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
    ) -> None:
        """Write the draft KV of prompts or parts of prompts: see Drafter.prefill.

        token_ids int64 [T], target_hidden_states [T, F] in the dtype of `inputs`. Raises BatchError, with nothing
        written, for lengths that exceed the tables.
        """
        batch, metadata = build_ragged(self.groups, tables, query_lens, seq_lens)
        with self.products():
            states = self.model.combine(target_hidden_states)
            self.write_prompt(token_ids, states, batch.positions, PagedAttention(self.groups, metadata))

    def write_prompt(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: PagedAttention
    ) -> None:
        """Write the KV of T tokens; token_ids, positions int64 [T], states [T, H] from `combine`."""
        self.model.forward(DraftInputs(token_ids, states, positions, attention))

    def prepare_step_0(self, size: int) -> None:
        """Set the state of step 0 for the first `size` rows, and build the metadata that the host builds."""
        for buffers, context_lens in self._place(size):
            buffers.build_at(context_lens, size)

    def _place(self, size: int) -> Sequence[tuple[StepBuffers, torch.Tensor]]:
        """Return the batches of step 0, each with its context lengths, int32 [rows]; device work only."""
        return [(self.step_0, self.inputs.context_lens)]

    @abstractmethod
    def run_step_0(self, size: int) -> None:
        """Run step 0 for the first `size` rows. Raises BatchError if the draft model returns states of the wrong
        shape."""

    def capturable(self, size: int) -> Capturable:
        """Return step 0 of `size` rows, with the part of its preparation that a graph holds."""

        def run() -> None:
            for buffers, context_lens in self._place(size):
                buffers.advance_to(context_lens, size)
            self.run_step_0(size)

        return Capturable(run, self._prepare_capture(size))

    def _prepare_capture(self, size: int) -> CaptureConstants:
        """Build all metadata of step 0 over padding rows; return the host constants that a capture bakes in."""
        return self.step_0.prepare_capture(size)

    def forward(
        self, size: int, token_ids: torch.Tensor, states: torch.Tensor, module: DraftModel | None = None
    ) -> torch.Tensor:
        """Return the states of all tokens of the step from one of the model's modules, or from the model.

        token_ids int64 [T], or [size, L] for a ContextBlockDraft; states [T, H], which the model reads at each token.
        Raises BatchError if the draft model returns states of the wrong shape.
        """
        model = self.model if module is None else module
        query_len, width = self.step_0.query_len, model.hidden_size
        positions = self.step_0.batch.positions[: size * query_len]
        with self.products():
            hidden = model.forward(DraftInputs(token_ids, states, positions, self.step_0.attention))
        _require_states(hidden, (size * query_len, width), f"{size} rows of {query_len} tokens")
        return hidden

    def forward_last(self, size: int) -> torch.Tensor:
        """Return the model's states [size, H] at each row's last accepted token, run over `shifted`.

        Raises BatchError as `forward` does.
        """
        query_len, width, accepted = self.step_0.query_len, self.model.hidden_size, self.inputs.accepted

        def keep(each: torch.Tensor) -> torch.Tensor:
            last = each.new_empty(size, *each.shape[1:])
            gather_accepted(*GatherAccepted(each.flatten(1), accepted, out=last.flatten(1), query_len=query_len))
            return last

        positions = self.step_0.batch.positions[: size * query_len]
        with self.products():
            inputs = DraftInputs(*self.shifted(size), positions, self.step_0.attention, keep)
            hidden = self.model.forward(inputs)
        _require_states(hidden, (size, width), f"the last tokens of {size} rows")
        return hidden

    def shifted(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's tokens shifted by one, with the next token after the last accepted, int64 [T], and the
        states [T, H] that the model reads at each."""
        inputs = self.inputs
        token_ids = shift_tokens(inputs.token_ids[:size], inputs.next_tokens, inputs.accepted)
        with self.products():
            return token_ids, self.model.combine(inputs.target_hidden_states[:size].flatten(0, 1))

    def logits(self, hidden: torch.Tensor, module: DraftModel | None = None) -> torch.Tensor:
        """Return logits [T, V of the draft] of hidden [T, H] from one of the model's modules, or from the model."""
        with self.products():
            return (self.model if module is None else module).logits(hidden)


def _require_states(hidden: object, shape: tuple[int, int], tokens: str) -> None:
    if isinstance(hidden, torch.Tensor) and hidden.shape == shape:
        return
    found = list(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
    raise BatchError(
        f"the draft model must return states {list(shape)} for {tokens}, got {found}; no token was drafted. Return a "
        "state of hidden_size for every token, or for every token that inputs.keep selects."
    )
