"""Backends whose attention is wrong, or reads what it must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_backends import Accepted
from attn_backends.torch_reference import TorchReference
from builders import AttentionSpec
from tests.mutants.mutant import attends_by, backend, forward, gives

RIGHT = "numerics.attention_is_right"
_IN_BUDGET = "its error is within the budget"


@attends_by(RIGHT, cases="base-*")
def top_left_causal(metadata: Any, spec: Any) -> Any:
    first = metadata.query_start_loc[metadata.token_to_req].int()
    token = torch.arange(metadata.num_tokens, dtype=torch.int32, device=first.device)
    return replace(metadata, kv_end=torch.minimum(token - first + 1, metadata.kv_end))


@forward(RIGHT, cases="base-*")
def gqa_interleaved(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    order = torch.arange(spec.num_q_heads).view(spec.group_size, spec.num_kv_heads).t().flatten()
    out = TorchReference.forward(self, query[:, order], cache, metadata, spec=spec, sinks=sinks)
    return out[:, order.argsort()]


@forward(RIGHT, cases="sinks-*", not_shown="the draft of a backend of keys and values has no sinks")
def forgets_sinks(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    return TorchReference.forward(self, query, cache, metadata, spec=replace(spec, sinks=False), sinks=None)


@forward("numerics.infinite_sinks_are_defined", not_shown="a draft's sinks are finite")
def takes_infinite_sinks_for_large(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    finite = None if sinks is None else sinks.clamp(-10.0, 10.0)
    return TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=finite)


@attends_by("poison.stale_table_entries_are_not_read")
def reads_past_the_end(metadata: Any, spec: Any) -> Any:
    return replace(metadata, kv_end=torch.where(metadata.kv_end > 0, metadata.kv_end + 1, 0))


@gives("poison.uninitialised_memory_is_not_read")
def reads_unwritten_scratch(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return out + 0 * torch.empty_like(out)


@forward("refusal.bad_tensors_never_reach_a_kernel")
def checks_no_input(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    return query.new_zeros(query.shape[0], spec.num_q_heads, spec.out_dim)


@attends_by("drafter.requests_stop_on_their_own", cases="k4-n7")
def live_rows_come_first(metadata: Any, spec: Any) -> Any:
    live = metadata.token_to_req < (metadata.seq_lens > 0).sum()
    return replace(metadata, kv_end=torch.where(live, metadata.kv_end, 0))


@attends_by("poison.request_order_does_not_matter")
def as_long_as_the_last_row(metadata: Any, spec: Any) -> Any:
    """Like a grid sized by the last request's length, in an engine that sorts requests."""
    lens = metadata.seq_lens
    last = torch.where(lens > 0, torch.arange(metadata.num_reqs, device=lens.device), 0).max()
    return replace(metadata, kv_end=torch.minimum(metadata.kv_end, lens[last[None]]))


@gives("poison.page_order_does_not_matter", not_shown=_IN_BUDGET)
def rounds_by_the_page(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return out * (1 + 2e-7 * (metadata.block_table[0, 0] % 2))


@backend("graph.replay_equals_eager", not_shown=_IN_BUDGET)
class EveryOtherCallRoundsUp(TorchReference):
    name = "every_other_call_rounds_up"

    def __init__(self) -> None:
        self.calls = torch.zeros(())

    def forward(self, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        self.calls.add_(1)
        out = super().forward(query, cache, metadata, spec=spec, sinks=sinks)
        return out * (1 + 2e-7 * (self.calls % 2))


@backend("refusal.unclaimed_is_refused", not_shown="what a backend accepts is asked before there is a drafter")
class AcceptsEverything(TorchReference):
    name = "accepts_everything"

    def supports(self, spec: AttentionSpec, device: torch.device) -> Any:
        return Accepted()
