"""A layer's step: its convolution, and then the matrices of a recurrence that has them.

Shape legend: T query tokens, R requests, S slots, J journal entries, H key heads, HV value heads, Dk and Dv their dims.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_backends.state import StateInputs
from attn_backends.state_cache import StateCache, StateLengths
from attn_backends.state_kernels.chain import launch_chain
from attn_backends.state_kernels.convolution import launch_convolution
from attn_backends.state_kernels.matrix import launch_matrix
from attn_backends.state_kernels.rows import metadata_of, plan_arguments
from attn_backends.torch_state import TorchState
from builders import Recurrence, StateMetadata, StateSpec
from builders.kernels.op import define_op


class StateStep(NamedTuple):
    """Take in the query tokens of a layer; returns [T, HV, Dv] in x's dtype, see `StateBackend.forward`.

    x, decay, beta, weight, bias, skip: see `StateInputs`; x with any strides but a contiguous last dim
    state, conv, key, update, decays: see `StateCache`; contiguous
    base, held: see `StateLengths`; read only
    query_start_loc  int32 [R + 1]; tokens from query_start_loc[R] on belong to no request, their output is undefined
    seq_lens         int32 [R]
    slots            int32 [R], any stride; those of live rows are distinct
    tree_masks       int64 [T], or None
    max_query_len    like all that follow, a capture constant
    max_seq_len, absorb, may_fold, reserve: as in `StateMetadata`
    recurrence       value of a `Recurrence`
    """

    x: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    skip: torch.Tensor | None
    state: torch.Tensor
    conv: torch.Tensor
    key: torch.Tensor
    update: torch.Tensor
    decays: torch.Tensor
    base: torch.Tensor
    held: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    tree_masks: torch.Tensor | None
    max_query_len: int
    max_seq_len: int
    absorb: bool
    may_fold: bool
    reserve: int
    recurrence: str

    @classmethod
    def of(cls, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, recurrence: Recurrence) -> StateStep:
        """Return the arguments for a layer's step."""
        return cls(
            **inputs._asdict(),
            state=cache.state,
            conv=cache.conv,
            key=cache.key,
            update=cache.update,
            decays=cache.decay,
            base=cache.lengths.base,
            held=cache.lengths.held,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            slots=metadata.slots,
            tree_masks=metadata.tree_masks,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            absorb=metadata.absorb,
            may_fold=metadata.may_fold,
            reserve=metadata.reserve,
            recurrence=recurrence.value,
        )

    def reference(self) -> torch.Tensor:
        _, value_heads, value_dim = self.fake().shape
        _, journal, key_heads, key_dim = self.key.shape
        spec = StateSpec(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            journal=journal,
            recurrence=Recurrence(self.recurrence),
            conv_width=self.weight.shape[1],
            dtype=self.x.dtype,
            tree=self.tree_masks is not None,
        )
        lengths = StateLengths(self.base, self.held, torch.zeros_like(self.held))
        cache = StateCache(self.state, self.conv, self.key, self.update, self.decays, lengths)
        metadata = metadata_of(self, num_tokens=len(self.x), max_query_len=self.max_query_len)
        return TorchState().forward(StateInputs(*self[:6]), cache, metadata, spec=spec)

    def fake(self) -> torch.Tensor:
        (heads, key_dim), value_dim = self.key.shape[2:], self.update.shape[3]
        return self.x.new_empty(len(self.x), (self.x.shape[1] - 2 * heads * key_dim) // value_dim, value_dim)

    def launch(self) -> torch.Tensor:
        plan = plan_arguments(self, self.key.shape[1])
        # Several kernels read these.
        step = self._replace(decay=self.decay.contiguous(), beta=self.beta.contiguous())
        convolved = launch_convolution(step, plan)
        if not Recurrence(self.recurrence).rule.has_matrix:
            return convolved.mixed.to(self.x.dtype).view(self.fake().shape)
        is_chain = not self.absorb and self.tree_masks is None
        return (launch_chain if is_chain else launch_matrix)(step, convolved, plan)


state_step = define_op("attn_backends::state_step", StateStep, mutates=("state", "conv", "key", "update", "decays"))
