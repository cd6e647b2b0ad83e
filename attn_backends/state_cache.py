"""The recurrent state of a layer: per slot a checkpoint, and a journal of the tokens after it.

A batch says by its lengths how much of a journal counts, so rejected tokens vanish when the lengths shrink: nothing is
committed or rolled back. And a state knows its own length, so a state that does not fit a batch is noticed on the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from builders import StateMetadata, StateSpec
from builders.errors import require, require_counts, require_tensor


@dataclass(frozen=True, slots=True)
class StateLengths:
    """What the slots of a group of layers hold, int32 [num_slots] each.

    base  tokens in the checkpoint
    held  journal entries after them
    lost  set when a batch did not fit the slot's state, which then stayed as it was; no kernel clears it
    """

    base: Tensor
    held: Tensor
    lost: Tensor

    def reach(self, slots: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each slot has the state of its first seq_lens tokens, bool [n], and the journal entries that
        lead there, int64 [n]; both arguments are int64 [n]."""
        replay = seq_lens - self.base[slots]
        empty = seq_lens == 0
        has = (replay >= 0) & (replay <= self.held[slots])
        return empty | has, torch.where(has & ~empty, replay, 0)


@dataclass(frozen=True, slots=True)
class StateCache:
    """One layer's slots. With S slots, J journal entries, H key heads, M matrices, W the convolution's width:

    state   [S, M, key_dim, value_dim]  state_dtype, after `base` tokens
    conv    [S, W - 1 + J, channels]    dtype: the last inputs before the journal, then the journal's inputs
    key     [S, J, H, key_dim]          fp32, k of `Recurrence`
    update  [S, J, M, value_dim]        fp32, u of `Recurrence`
    decay   [S, J, *spec.decay_dims]    fp32, log decay

    Without matrices, all but conv are empty. Memory where nothing was written may hold NaN. lengths: shared by the
    layers of a group.
    """

    state: Tensor
    conv: Tensor
    key: Tensor
    update: Tensor
    decay: Tensor
    lengths: StateLengths

    def check(self, spec: StateSpec, device: torch.device) -> None:
        """Raise BatchError for tensors whose shape, dtype or device is not the spec's."""
        slots = self.state.shape[:1]
        for name, (dims, dtype) in _parts(spec).items():
            part, shape = getattr(self, name), (*slots, *dims)
            require_tensor(f"{name} of the cache", part, shape=shape, dtype=dtype, device=device)
        for name in ("base", "held", "lost"):
            tensor = getattr(self.lengths, name)
            require_tensor(f"{name} of the cache", tensor, shape=slots, dtype=torch.int32, device=device)


def _parts(spec: StateSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the dims and dtype of what a slot has in a layer, by the name of its tensor in `StateCache`."""
    matrices, journal = spec.matrices, spec.journal
    return {
        "state": ((matrices, spec.key_dim, spec.value_dim), spec.state_dtype),
        "conv": ((spec.conv_width - 1 + journal, spec.conv_channels), spec.dtype),
        "key": ((journal, spec.num_key_heads, spec.key_dim), torch.float32),
        "update": ((journal, matrices, spec.value_dim), torch.float32),
        "decay": ((journal, *spec.decay_dims), torch.float32),
    }


def bytes_of_slot(spec: StateSpec) -> int:
    """Return what a slot of one layer takes."""
    return sum(prod(dims) * dtype.itemsize for dims, dtype in _parts(spec).values())


def allocate_caches(spec: StateSpec, num_layers: int, num_slots: int, device: torch.device) -> tuple[StateCache, ...]:
    """Allocate the caches of a group, with empty lengths and uninitialised tensors. Raises BatchError for no layers or
    no slots."""
    require_counts("layers and slots of recurrent state", (num_layers, num_slots))
    require(
        min(num_layers, num_slots) >= 1,
        f"recurrent state needs a layer and a slot, got {num_layers} and {num_slots}; nothing was allocated. Pass the "
        "layers of the group, and a slot for each request.",
    )
    lengths = StateLengths(*(torch.zeros(num_slots, dtype=torch.int32, device=device) for _ in range(3)))
    caches = []
    for _ in range(num_layers):
        parts = _parts(spec).items()
        new = {name: torch.empty(num_slots, *dims, dtype=dtype, device=device) for name, (dims, dtype) in parts}
        caches.append(StateCache(**new, lengths=lengths))
    return tuple(caches)


class StepPlan(NamedTuple):
    """What a step does to the slot of each row, from lengths alone. [R] each: int64, and bool from `live` on.

    slot        0 in rows that are not live
    query_lens  tokens to take in
    context     tokens before them
    replay      journal entries that count: the first ones
    live        has a state that fits; any other row is inert
    fresh       has no context, so its slot holds nothing of it
    fold        writes the replayed state as the new checkpoint, so its entries go to the front of the journal
    lost        would be live, but its state does not fit its lengths
    """

    slot: Tensor
    query_lens: Tensor
    context: Tensor
    replay: Tensor
    live: Tensor
    fresh: Tensor
    fold: Tensor
    lost: Tensor

    @property
    def first_entry(self) -> Tensor:
        """Journal entry of the first query token, int64 [R]."""
        return torch.where(self.fold, 0, self.replay)


def plan_step(lengths: StateLengths, metadata: StateMetadata, spec: StateSpec) -> StepPlan:
    """Plan a step. It only reads, and every layer of a step must get the same lengths. Device work only.

    A row whose length is 0 or beyond max_seq_len is inert, and so is one whose slot is no slot of the cache. Otherwise
    replay = seq_len - query_len - base, and the state is lost unless 0 <= replay <= held and the entries fit.
    """
    starts, seq_lens, slots = (part.long() for part in (metadata.query_start_loc, metadata.seq_lens, metadata.slots))
    query_lens = starts[1:] - starts[:-1]
    runs = (seq_lens > 0) & (seq_lens <= metadata.max_seq_len) & (query_lens > 0)
    runs &= (slots >= 0) & (slots < len(lengths.base))
    slot = torch.where(runs, slots, 0)
    context = torch.where(runs, seq_lens - query_lens, 0)
    fresh = runs & (context == 0)
    has, replay = lengths.reach(slot, context)
    lost = runs & ~has
    fold = fresh
    if not metadata.absorb:
        full = replay + query_lens + metadata.reserve > spec.journal
        fold = fresh | (runs & full) if metadata.may_fold else fresh
        lost = lost | (runs & ~fold & (replay + query_lens > spec.journal))
    live = runs & ~lost
    return StepPlan(
        slot=torch.where(live, slot, 0),
        query_lens=torch.where(live, query_lens, 0),
        context=torch.where(live, context, 0),
        replay=torch.where(live, replay, 0),
        live=live,
        fresh=fresh & live,
        fold=fold & live,
        lost=lost,
    )


def factors(decay: Tensor) -> Tensor:
    """Return what log decays [n, T, *spec.decay_dims] multiply states with: [n, T, M, 1 or key_dim, 1]."""
    return decay.exp().view(*decay.shape[:3], *decay.shape[3:] or (1,), 1)


def replayed(cache: StateCache, slot: Tensor, replay: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state fp32 [n, M, key_dim, value_dim] after the first `replay` journal entries of each slot, and the
    convolution's window [n, W - 1, channels]: both zeros where not `filled`.

    slot, replay: int64 [n]; filled: bool [n]. An entry changes a state by the operations of `TorchState.forward`, in
    the same order, so both give the same bits.
    """
    state = torch.where(_over(filled, cache.state), cache.state[slot].float(), 0.0)
    key, update, decay = (part[slot] for part in (cache.key, cache.update, cache.decay))
    key, factor = key.repeat_interleave(update.shape[2] // max(1, key.shape[2]), 2), factors(decay)
    for entry in range(key.shape[1] if state.numel() else 0):
        after = state * factor[:, entry] + key[:, entry, ..., None] * update[:, entry, :, None]
        state = torch.where(_over(filled & (entry < replay), state), after, state)
    width = cache.conv.shape[1] - key.shape[1]
    place = replay.clamp(0, key.shape[1])[:, None] + torch.arange(width, device=replay.device)
    window = cache.conv[slot].gather(1, place[..., None].expand(-1, -1, cache.conv.shape[2]))
    return state, torch.where(_over(filled, window), window, 0.0)


def appended(journal: Tensor, new: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """Return a journal [n, J, ...] with the first `count` entries of new [n, Q, ...] from entry `first` on.

    first, count: int64 [n]
    """
    entry = torch.arange(journal.shape[1], device=journal.device) - first[:, None]
    source = entry.clamp(0, new.shape[1] - 1)
    taken = (entry >= 0) & (entry < count[:, None])
    rows = torch.arange(len(new), device=new.device)[:, None]
    return torch.where(taken.view(*taken.shape, *(1,) * (new.dim() - 2)), new[rows, source].to(journal.dtype), journal)


def store(part: Tensor, slot: Tensor, live: Tensor, new: Tensor) -> None:
    """Write new [n, ...] to the slots of the live rows, which are distinct, and nothing to any other slot.

    slot: int64 [n], some slot in rows that are not live. Those write what the first live row writes.
    """
    writer = torch.where(live, torch.arange(len(slot), device=slot.device), live.int().argmax())
    at = slot[writer]
    part[at] = torch.where(_over(live[writer], new), new[writer].to(part.dtype), part[at])


def _over(rows: Tensor, tensor: Tensor) -> Tensor:
    """Return [n] as [n, 1, ...] with as many dims as the tensor, to select whole rows of it."""
    return rows.view(-1, *(1,) * (tensor.dim() - 1))
