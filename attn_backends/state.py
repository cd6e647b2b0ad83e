"""The contract of a backend of recurrent state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from attn_backends.capabilities import Accepted, Rejected
from attn_backends.state_cache import (
    StateCache,
    StateLengths,
    StepPlan,
    allocate_caches,
    plan_step,
    replayed,
    store,
)
from attn_backends.state_capabilities import StateCapabilities
from builders import CONTRACT_VERSION, BatchError, StateBuilder, StateMetadata, StateSpec
from builders.errors import require, require_tensor, require_vector


class StateInputs(NamedTuple):
    """What a layer's projections give for T query tokens, and its weights. C: the channels of [q | k | v], with q and k
    of every key head and v of every value head. W: the convolution's width.

    x       [T, C]                      spec.dtype, before the convolution
    decay   fp32 [T, *spec.decay_dims]  log decay, at most 0
    beta    fp32 [T, spec.matrices]
    weight  [C, W]                      spec.dtype, of the depthwise convolution; the last column is the newest token's
    bias    [C]                         spec.dtype, or None
    skip    fp32 [num_value_heads]      or None; only if the recurrence's rule `skips`
    """

    x: Tensor
    decay: Tensor
    beta: Tensor
    weight: Tensor
    bias: Tensor | None = None
    skip: Tensor | None = None


class StateBackend(ABC):
    """One family of recurrent kernels behind one contract. Stateless: everything per batch lives in the metadata, and
    everything per request in the caches.

    A step calls `forward` for each layer of a group and `end_step` once after the last. Both can be captured. What this
    class defines is plain torch on any device; override what kernels do faster.
    """

    name: ClassVar[str]
    capabilities: ClassVar[StateCapabilities]
    builder: ClassVar[type[StateBuilder]] = StateBuilder
    contract_version: ClassVar[tuple[int, int]] = CONTRACT_VERSION
    """The contract (major, minor) that the backend was written for. Its own class must state it, as a literal."""
    version: ClassVar[str] = "0"
    """Version of the kernels, for provenance."""

    def supports(self, spec: StateSpec, device: torch.device) -> Accepted | Rejected:
        """Return whether the spec runs on the device: Accepted, or Rejected with every reason."""
        reasons = self.capabilities.unsupported_reasons(spec, device) + self.unsupported_reasons(spec, device)
        return Rejected(tuple(reasons)) if reasons else Accepted()

    def unsupported_reasons(self, spec: StateSpec, device: torch.device) -> list[str]:
        """Return the reasons that the capability record cannot express."""
        return []

    def allocate_state(
        self, spec: StateSpec, num_layers: int, num_slots: int, device: torch.device
    ) -> tuple[StateCache, ...]:
        """Allocate the slots of a group of layers: uninitialised caches, and empty lengths that they share.

        Raises BatchError, with every reason and before anything is allocated, for a spec that the backend does not
        serve, and for no layers or no slots.
        """
        answer = self.supports(spec, device)
        if isinstance(answer, Rejected):
            raise BatchError(
                f"{self.name} does not serve [{spec.describe()}] on {device.type}: {'; '.join(answer.reasons)}; "
                "nothing was allocated. Change the spec, or choose another backend."
            )
        return allocate_caches(spec, num_layers, num_slots, device)

    @abstractmethod
    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        """Take in the query tokens of one layer and return their outputs [num_tokens, num_value_heads, value_dim] in
        spec.dtype; see `Recurrence` for the formula and `plan_step` for what each slot does.

        Without absorb, the tokens join the journal, and a slot that folds writes the state before them as its
        checkpoint. With absorb, the state after them is the checkpoint. Neither changes the lengths. A row that is
        padding or lost reads and writes nothing, and outputs 0, whatever memory holds.

        Raises BatchError, before anything is written, for tensors that a kernel would misread.
        """

    def plan_step(self, lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
        """See `attn_backends.state_cache.plan_step`."""
        return plan_step(lengths, metadata, spec)

    def end_step(self, lengths: StateLengths, metadata: StateMetadata, *, spec: StateSpec) -> None:
        """Count the tokens of a step, in place, after the forward of the group's last layer, and flag lost slots."""
        plan = self.plan_step(lengths, metadata, spec)
        base, held = (part[plan.slot].long() for part in (lengths.base, lengths.held))
        if metadata.absorb:
            base, held = plan.context + plan.query_lens, torch.zeros_like(held)
        else:
            base, held = torch.where(plan.fold, plan.context, base), plan.first_entry + plan.query_lens
        store(lengths.base, plan.slot, plan.live, base)
        store(lengths.held, plan.slot, plan.live, held)
        slots = torch.where(plan.lost, metadata.slots.long(), 0)
        lengths.lost.scatter_reduce_(0, slots, plan.lost.int(), "amax")

    def read(self, cache: StateCache, slots: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state fp32 [n, spec.matrices, key_dim, value_dim] of slots after their first seq_lens tokens,
        and the convolution's last inputs [n, W - 1, channels]: NaN if a slot does not have that state.

        slots, seq_lens: int64 [n]; slots of the cache.
        """
        has, replay = cache.lengths.reach(slots, seq_lens)
        state, window = replayed(cache, slots, replay, seq_lens > 0)
        state.masked_fill_(~has[:, None, None, None], torch.nan)
        window.masked_fill_(~has[:, None, None], torch.nan)
        return state, window

    def copy(self, caches: Sequence[StateCache], sources: Tensor, targets: Tensor, seq_lens: Tensor) -> None:
        """Give target slots the states that source slots have after their first seq_lens tokens, as checkpoints: to
        keep a prefix, or to begin from one. A target is lost if its source does not have that state.

        caches: all layers of a group. sources, targets, seq_lens: int64 [n]; targets are distinct and no sources.
        Raises BatchError for vectors of another length, dtype or device.
        """
        lengths, device = caches[0].lengths, caches[0].state.device
        for name, vector in (("sources", sources), ("targets", targets), ("seq_lens", seq_lens)):
            require_vector(name, vector, length=len(sources), dtype=torch.int64, device=device)
        for cache in caches:
            state, window = self.read(cache, sources, seq_lens)
            cache.state[targets] = state.to(cache.state.dtype)
            cache.conv[targets, : window.shape[1]] = window
        has, _ = lengths.reach(sources, seq_lens)
        lengths.base[targets] = seq_lens.int()
        lengths.held[targets] = torch.zeros_like(lengths.held[targets])
        lengths.lost[targets] |= (~has).int()

    def move_accepted(
        self, caches: Sequence[StateCache], metadata: StateMetadata, path: Tensor, *, spec: StateSpec
    ) -> None:
        """Compact the journals after a verified tree, in place: the entry of the i-th accepted token moves to that of
        query token i. Call it after `end_step`, with the metadata of that step and before its lengths change.

        caches: all layers of the group. path: int64 [num_reqs, K], of a TreeVerifyOutput; a value that is not a query
        token moves nothing. Device work only. Raises BatchError for a path of another shape, dtype or device.
        """
        lengths, starts = caches[0].lengths, metadata.query_start_loc.long()
        require_tensor("path", path, shape=(metadata.num_reqs, None), dtype=torch.int64, device=starts.device)
        seq_lens, slots = metadata.seq_lens.long(), metadata.slots.long()
        live = (seq_lens > 0) & (slots >= 0) & (slots < len(lengths.base))
        slot, query_lens = torch.where(live, slots, 0), starts[1:] - starts[:-1]
        first = lengths.held[slot] - query_lens
        # A row that the step left out does not end where its lengths say.
        live &= (seq_lens == lengths.base[slot] + lengths.held[slot]) & (first >= 0)
        own = torch.arange(spec.journal, device=path.device)
        entry = own - first[:, None] - 1
        token = path.gather(1, entry.clamp(0, path.shape[1] - 1))
        moves = (entry >= 0) & (entry < path.shape[1]) & (token > 0) & (token < query_lens[:, None])
        source = torch.where(moves, first[:, None] + token, own).clamp(0, spec.journal - 1)
        rows = torch.arange(len(slot), device=path.device)[:, None]
        for cache in caches:
            for part in (cache.key, cache.update, cache.decay, cache.conv[:, spec.conv_width - 1 :]):
                store(part, slot, live, part[slot][rows, source])


def check_state_inputs(inputs: StateInputs, cache: StateCache, metadata: StateMetadata, spec: StateSpec) -> None:
    """Raise BatchError for tensors that a kernel would misread, and for tables of more slots than the cache has. It
    never syncs with the device."""
    device, tokens, channels = cache.state.device, metadata.num_tokens, spec.conv_channels
    cache.check(spec, device)
    slots = len(cache.state)
    require(
        (metadata.num_slots or 0) <= slots,
        f"the cache must have the {metadata.num_slots} slots that the batch's tables name, got {slots}; nothing was "
        f"written. Allocate more slots, or make tables with num_pages={slots} for this group.",
    )
    require_tensor("x", inputs.x, shape=(tokens, channels), dtype=spec.dtype, device=device)
    require_tensor("decay", inputs.decay, shape=(tokens, *spec.decay_dims), dtype=torch.float32, device=device)
    require_tensor("beta", inputs.beta, shape=(tokens, spec.matrices), dtype=torch.float32, device=device)
    require_tensor("weight", inputs.weight, shape=(channels, spec.conv_width), dtype=spec.dtype, device=device)
    if inputs.bias is not None:
        require_vector("bias", inputs.bias, length=channels, dtype=spec.dtype, device=device)
    if inputs.skip is not None:
        require(
            spec.recurrence.rule.skips,
            f"skip must be None for {spec.recurrence.value}, whose outputs have no such part, got a tensor. Omit it.",
        )
        require_vector("skip", inputs.skip, length=spec.num_value_heads, dtype=torch.float32, device=device)
