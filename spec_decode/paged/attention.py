"""Attention and recurrence over the caches of a model's groups, whole or split around calls that no graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from attn_backends import StateInputs
from attn_backends.capabilities import FusedWrite
from attn_backends.kernels.rope import Rope, apply_rope
from builders import AttentionKind, BatchError
from spec_decode.graphs import SplitOp
from spec_decode.model_api import AttentionInputs
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.paged.state_group import StateGroup


class PagedAttention:
    """A `RecurrentAttention`: writes a layer's new keys and values to its cache, then attends over it; or takes a
    recurrent layer's tokens into its states."""

    def __init__(self, groups: Sequence[KVGroup | StateGroup], metadata: Sequence[Any]) -> None:
        """metadata: one per group, read at each call."""
        self._metadata = metadata
        kv = {index: group for index, group in enumerate(groups) if isinstance(group, KVGroup)}
        states = {index: group for index, group in enumerate(groups) if isinstance(group, StateGroup)}
        self._groups, self._group_of = kv, _GroupOf(kv, "attention", "KV")
        self._states, self._state_of = states, _GroupOf(states, "a recurrence", "state")

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """See `Attention`. Raises BatchError, before any launch, for tensors that a kernel would misread."""
        index = self._group_of[inputs.layer]
        group, metadata = self._groups[index], self._metadata[index]
        query = _write(group, metadata, inputs)
        cache = group.caches[inputs.layer]
        return group.backend.forward(query, cache, metadata, spec=group.spec, sinks=inputs.sinks)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, rope: Rope) -> None:
        """See `ContextAttention`."""
        index = self._group_of[layer]
        group, dtype = self._groups[index], self._groups[index].spec.new_kv_dtype
        rotated = apply_rope(key, rope).to(dtype)
        group.backend.write_kv(rotated, value.to(dtype), group.caches[layer], self._metadata[index])

    def recur(self, layer: int, inputs: StateInputs) -> torch.Tensor:
        """See `RecurrentAttention`. Raises BatchError, before any launch, for tensors that a kernel would misread."""
        index = self._state_of[layer]
        group = self._states[index]
        return group.backend.forward(inputs, group.caches[layer], self._metadata[index], spec=group.spec)


class _GroupOf(dict[int, int]):
    """Layer -> index of its group."""

    def __init__(self, groups: Mapping[int, KVGroup | StateGroup], what: str, kind: str) -> None:
        super().__init__((layer, index) for index, group in groups.items() for layer in group.caches)
        self._what, self._kind = what, kind

    def __missing__(self, layer: int) -> int:
        raise BatchError(
            f"layer {layer!r} asks for {self._what} and is in no {self._kind} group; the groups have the layers "
            f"{sorted(self)}. List it in the model's {'layer' if self._kind == 'KV' else 'state'}_groups."
        )


class SplitAttention:
    """`PagedAttention` for a step captured in pieces: uncaptured groups run eagerly between the pieces.

    An eager call uses the metadata of this capture, which the graph advances; for a group that the host builds it uses
    the current metadata of the step buffers. Rotation and write belong to the eager call so that every strategy runs
    the same kernels: another kernel could round a bfloat16 key the other way.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup | StateGroup],
        metadata: Sequence[Any],
        *,
        uncaptured: Collection[int],
        built: Collection[int],
        split_op: SplitOp,
    ) -> None:
        """metadata: the step buffers' own list. uncaptured, built: group indices."""
        self._groups, self._current, self._captured = groups, metadata, list(metadata)
        self._built, self._split_op = built, split_op
        self._uncaptured_layers = {layer for index in uncaptured for layer in groups[index].caches}
        self._captured_attention = PagedAttention(groups, self._captured)

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """See `Attention`."""
        if inputs.layer not in self._uncaptured_layers:
            return self._captured_attention(inputs)

        return attend_between(self._split_op, inputs, lambda now: self._now()(now))

    def recur(self, layer: int, inputs: StateInputs) -> torch.Tensor:
        """See `RecurrentAttention`."""
        if layer not in self._uncaptured_layers:
            return self._captured_attention.recur(layer, inputs)

        return recur_between(self._split_op, inputs, lambda now: self._now().recur(layer, now))

    def _now(self) -> PagedAttention:
        now = [self._current[i] if i in self._built else held for i, held in enumerate(self._captured)]
        return PagedAttention(self._groups, now)


def attend_between(
    split_op: SplitOp, inputs: AttentionInputs, attend: Callable[[AttentionInputs], torch.Tensor]
) -> torch.Tensor:
    """Split a layer's attention out of a capture: each replay calls attend on the inputs as they are then."""
    # Keeps no query, key or value: they are the graph's.
    make, options = partial(AttentionInputs, inputs.layer), inputs[4:]

    def eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(make(query, key, value, *options))

    return split_op(eager, inputs.query, inputs.key, inputs.value)


def recur_between(split_op: SplitOp, inputs: StateInputs, recur: Callable[[StateInputs], torch.Tensor]) -> torch.Tensor:
    """The same for a recurrent layer."""
    weights = inputs[3:]

    def eager(x: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return recur(StateInputs(x, decay, beta, *weights))

    return split_op(eager, inputs.x, inputs.decay, inputs.beta)


def _write(group: KVGroup, metadata: Any, inputs: AttentionInputs) -> torch.Tensor:
    """Write a layer's keys and values in as few kernels as the backend declares; return the rotated query."""
    backend: Any = group.backend
    fused = backend.capabilities.fused_writes
    cache, dtype = group.caches[inputs.layer], group.spec.new_kv_dtype
    query, key, value = inputs.query, inputs.key, inputs.value
    if inputs.kv_a_norm_rope is not None and FusedWrite.KV_A_NORM_ROPE in fused:
        backend.norm_rope_and_write_latent(key[:, 0].to(dtype), inputs.kv_a_norm_rope, cache, metadata)
        return query
    same_dtype = key.dtype == dtype and group.spec.kind is AttentionKind.MHA
    if inputs.rope is not None and FusedWrite.ROPE in fused and same_dtype:
        backend.rope_and_write_kv(query, key, value, inputs.rope, cache, metadata)
        return query
    query, key, value = inputs.normed_and_rotated()
    backend.write_kv(key.to(dtype), value.to(dtype), cache, metadata)
    return query
