"""Backends of recurrent state that are broken in one way each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_backends import Accepted, StateCache, StateInputs, StateLengths, StepPlan
from attn_backends.state_cache import allocate_caches, replayed
from attn_backends.torch_state import TorchState
from builders import AdvanceSupport, AttentionBatch, Recurrence, StateBuilder, StateMetadata, StateSpec
from tests.mutants.mutant import Mutant, backend


@backend("state.steps_mean_a_sequential_run")
class ReplaysWithoutDecay(TorchState):
    def replay(self, cache: StateCache, plan: StepPlan) -> tuple[Tensor, Tensor]:
        return super().replay(replace(cache, decay=torch.zeros_like(cache.decay)), plan)


@backend("state.steps_mean_a_sequential_run", cases="kda")
class AveragesTheDecayOfChannels(TorchState):
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        if spec.recurrence.rule.decays_by_channel:
            mean = inputs.decay.mean(-1, keepdim=True)
            inputs = inputs._replace(decay=mean.expand_as(inputs.decay).contiguous())
        return super().forward(inputs, cache, metadata, spec=spec)


@backend("state.steps_mean_a_sequential_run", cases="ssd")
class TakesMamba2ForADeltaRule(TorchState):
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        if spec.recurrence is Recurrence.SSD:
            spec, inputs = replace(spec, recurrence=Recurrence.GATED_DELTA), inputs._replace(skip=None)
        return super().forward(inputs, cache, metadata, spec=spec)


@backend("state.steps_mean_a_sequential_run", cases="ssd")
class LeavesOutTheSkip(TorchState):
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        return super().forward(inputs._replace(skip=None), cache, metadata, spec=spec)


@backend("state.steps_mean_a_sequential_run", cases="conv")
class ActivatesShortConvolutions(TorchState):
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        out = super().forward(inputs, cache, metadata, spec=spec)
        return out if spec.recurrence.rule.has_matrix else torch.nn.functional.silu(out)


def _wrong_if(name: str, wrong: Callable[[StateInputs, StateSpec, StateMetadata], bool]) -> Mutant:
    """Return a mutant whose outputs are wrong where `wrong` says so."""

    def forward(
        self: TorchState, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec
    ) -> Tensor:
        out = TorchState.forward(self, inputs, cache, metadata, spec=spec)
        return 1.5 * out if wrong(inputs, spec, metadata) else out

    broken: type[TorchState] = type("WrongAtASize", (TorchState,), {"forward": forward})
    return Mutant(name, "state.sizes_are_served", broken())


NO_WINDOWS = _wrong_if("no_windows", lambda inputs, spec, metadata: spec.conv_width == 1)
KEYS_OF_48 = _wrong_if("keys_of_48", lambda inputs, spec, metadata: spec.key_dim == 48)
VALUES_OF_64 = _wrong_if("values_of_64", lambda inputs, spec, metadata: spec.value_dim == 64)
WINDOWS_OF_3 = _wrong_if("windows_of_3", lambda inputs, spec, metadata: spec.conv_width == 3)
SHORT_JOURNALS = _wrong_if("short_journals", lambda inputs, spec, metadata: spec.journal < 7)
THREE_KEY_HEADS = _wrong_if("three_key_heads", lambda inputs, spec, metadata: spec.num_key_heads == 3)
GROUPS_OF_4 = _wrong_if("groups_of_4", lambda inputs, spec, metadata: spec.group_size == 4)
NO_BIAS = _wrong_if("no_bias", lambda inputs, spec, metadata: inputs.bias is None)
NINE_REQUESTS = _wrong_if("nine_requests", lambda inputs, spec, metadata: metadata.num_reqs > 8)
EIGHT_TOKENS = _wrong_if(
    "eight_tokens", lambda inputs, spec, metadata: not metadata.absorb and metadata.max_query_len > 7
)


@backend("state.steps_go_on")
class CountsInBfloat16(TorchState):
    """bfloat16 has every count up to 256."""

    def plan_step(self, lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
        return super().plan_step(replace(lengths, base=lengths.base.bfloat16().int()), metadata, spec)


@backend("state.rejected_tokens_leave_nothing")
class ReplaysRejectedTokens(TorchState):
    def plan_step(self, lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
        plan = super().plan_step(lengths, metadata, spec)
        return plan._replace(replay=torch.where(plan.live & ~plan.fresh, lengths.held[plan.slot], 0).long())


@backend("state.windows_roll_back")
class KeepsTheLastWindow(TorchState):
    def replay(self, cache: StateCache, plan: StepPlan) -> tuple[Tensor, Tensor]:
        state, _ = super().replay(cache, plan)
        return state, super().replay(cache, plan._replace(replay=cache.lengths.held[plan.slot].long()))[1]


@backend("state.rows_can_move")
class KeepsStatesByRow(TorchState):
    def plan_step(self, lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
        rows = torch.arange(metadata.num_reqs, device=lengths.base.device)
        return super().plan_step(lengths, replace(metadata, slots=rows), spec)


@backend("state.slots_start_empty")
class ReadsTheLastOwnersState(TorchState):
    def replay(self, cache: StateCache, plan: StepPlan) -> tuple[Tensor, Tensor]:
        return replayed(cache, plan.slot, plan.replay, plan.live)


@backend("state.padding_stays_inert")
class WritesSlot0InPadding(TorchState):
    def store_window(self, cache: StateCache, plan: StepPlan, rows: Tensor, window: Tensor) -> None:
        super().store_window(cache, plan, rows | ~plan.live, window)


@backend("state.steps_of_any_length_follow")
class CountsNoSingleToken(TorchState):
    def end_step(self, lengths: StateLengths, metadata: StateMetadata, *, spec: StateSpec) -> None:
        if metadata.absorb or metadata.max_query_len > 1:
            super().end_step(lengths, metadata, spec=spec)


@backend("state.prompts_in_chunks_equal_one")
class ForgetsTheWindowBetweenChunks(TorchState):
    absorbs = False

    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        self.absorbs = metadata.absorb
        return super().forward(inputs, cache, metadata, spec=spec)

    def replay(self, cache: StateCache, plan: StepPlan) -> tuple[Tensor, Tensor]:
        state, window = super().replay(cache, plan)
        return state, torch.zeros_like(window) if self.absorbs else window


@backend("state.snapshots_are_independent")
class CopiesTheCheckpointOnly(TorchState):
    def read(self, cache: StateCache, slots: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        return super().read(cache, slots, torch.minimum(seq_lens, cache.lengths.base[slots]))


@backend("state.trees_follow_the_path")
class KeepsTheFirstNodes(TorchState):
    def move_accepted(self, *args: Any, **options: Any) -> None:
        """Leave the journal as the tree wrote it."""


@backend("state.trees_follow_the_path")
class TakesATreeForAChain(TorchState):
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        return super().forward(inputs, cache, replace(metadata, tree_masks=None), spec=spec)


@backend("state.later_steps_can_be_forgotten")
class FoldsLaterSteps(TorchState):
    def plan_step(self, lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
        plan = super().plan_step(lengths, metadata, spec)
        return plan if metadata.may_fold else plan._replace(fold=plan.live)


@backend("state.lost_states_are_reported")
class FoldsFullJournals(TorchState):
    def plan_step(self, lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
        return super().plan_step(lengths, replace(metadata, may_fold=True), spec)


@backend("state.later_steps_can_be_forgotten")
class LeavesNoRoomForLaterSteps(TorchState):
    def plan_step(self, lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
        return super().plan_step(lengths, replace(metadata, reserve=0), spec)


@backend("state.lost_states_are_reported")
class ClampsInSilence(TorchState):
    def plan_step(self, lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
        plan = super().plan_step(lengths, metadata, spec)
        return plan._replace(lost=torch.zeros_like(plan.lost))


class _NotesFirstLayers(TorchState):
    first: Any = None

    def allocate_state(self, *args: Any) -> tuple[StateCache, ...]:
        caches = super().allocate_state(*args)
        self.first = caches[0]
        return caches


@backend("state.layers_step_together")
class CountsAfterTheFirstLayer(_NotesFirstLayers):
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        out = super().forward(inputs, cache, metadata, spec=spec)
        if cache is self.first:
            super().end_step(cache.lengths, metadata, spec=spec)
        return out

    def end_step(self, lengths: StateLengths, metadata: StateMetadata, *, spec: StateSpec) -> None:
        """Counted already."""


@backend("state.layers_step_together")
class MovesAllLayersButTheLast(TorchState):
    def move_accepted(self, caches: Sequence[StateCache], *args: Any, **options: Any) -> None:
        super().move_accepted(caches[:-1], *args, **options)


class CopiesLengths(StateBuilder):
    def build(self, batch: AttentionBatch, **options: Any) -> StateMetadata:
        metadata = super().build(batch, **options)
        return replace(metadata, seq_lens=metadata.seq_lens.clone())


@backend("state.graph_replays_over_other_batches")
class ReplaysTheCapturedLengths(TorchState):
    builder = CopiesLengths


class WaitsInAdvance(StateBuilder):
    def advance(self, metadata: StateMetadata) -> None:
        metadata.seq_lens.sum().item()


class MovesLengthsTwice(StateBuilder):
    def advance(self, metadata: StateMetadata) -> None:
        metadata.seq_lens.add_(1)


class MovesPaddingRows(StateBuilder):
    def advance(self, metadata: StateMetadata) -> None:
        metadata.seq_lens.clamp_(min=1)


class KeepsLengths(CopiesLengths):
    @classmethod
    def advance_support(cls, spec: StateSpec, device: torch.device) -> AdvanceSupport:  # type: ignore[override]
        return StateBuilder.advance_support(spec, device)


@backend("state.advances_mean_a_rebuild")
class WaitsForTheHostInAdvance(TorchState):
    builder = WaitsInAdvance


@backend("state.advances_mean_a_rebuild")
class MovesLengthsThatHaveMoved(TorchState):
    builder = MovesLengthsTwice


@backend("state.advances_mean_a_rebuild")
class BeginsRequestsInPadding(TorchState):
    builder = MovesPaddingRows


@backend("state.advances_mean_a_rebuild", cases="long_journal")
class AdvancesNoLengths(TorchState):
    builder = KeepsLengths


@backend("state.rollback_is_bitwise")
class RoundsUpdates(TorchState):
    """Keeps the 10 bits of TF32 of each update in the journal."""

    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        out = super().forward(inputs, cache, metadata, spec=spec)
        cache.update.view(torch.int32).bitwise_and_(-(1 << 13))
        return out


@backend("state.unclaimed_is_refused")
class AcceptsEverything(TorchState):
    def supports(self, spec: StateSpec, device: torch.device) -> Accepted:
        return Accepted()


@backend("state.unclaimed_is_refused")
class AllocatesForAnySpec(TorchState):
    def allocate_state(
        self, spec: StateSpec, num_layers: int, num_slots: int, device: torch.device
    ) -> tuple[StateCache, ...]:
        return allocate_caches(spec, num_layers, num_slots, device)


@backend("state.bad_tensors_never_reach_a_kernel")
class CastsInputs(TorchState):
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        cast: Any = (None if part is None else part.float() for part in inputs)
        return super().forward(StateInputs(*cast), cache, metadata, spec=spec)


@backend("state.bad_tensors_never_reach_a_kernel")
class TakesTablesOfMoreSlots(TorchState):
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        return super().forward(inputs, cache, replace(metadata, num_slots=None), spec=spec)
