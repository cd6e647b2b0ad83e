"""Backends whose attention is wrong, or reads what it must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_backends.torch_reference import TorchReference
from builders import AttentionSpec
from tests.mutants.mutant import Mutant, attends_by, gives, with_forward


@attends_by
def _top_left_causal(metadata: Any, spec: Any) -> Any:
    first = metadata.query_start_loc[metadata.token_to_req].int()
    token = torch.arange(metadata.num_tokens, dtype=torch.int32, device=first.device)
    end = torch.minimum(token - first + 1, metadata.kv_end)
    return replace(metadata, kv_end=end)


def _interleaved_groups(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    order = torch.arange(spec.num_q_heads).view(spec.group_size, spec.num_kv_heads).t().flatten()
    out = TorchReference.forward(self, query[:, order], cache, metadata, spec=spec, sinks=sinks)
    return out[:, order.argsort()]


def _forgets_sinks(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    bare = replace(spec, sinks=False)
    return TorchReference.forward(self, query, cache, metadata, spec=bare, sinks=None)


def _takes_infinite_sinks_for_large(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    finite = None if sinks is None else sinks.clamp(-10.0, 10.0)
    return TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=finite)


@attends_by
def _reads_a_token_too_many(metadata: Any, spec: Any) -> Any:
    return replace(metadata, kv_end=torch.where(metadata.kv_end > 0, metadata.kv_end + 1, 0))


@gives
def _uses_scratch_unwritten(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return out + 0 * torch.empty_like(out)


def _checks_nothing(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    return query.new_zeros(query.shape[0], spec.num_q_heads, spec.out_dim)


def _as_long_as_the_last_row(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    """As a grid by the last request's length is, where engines sort their requests."""
    last = torch.where(metadata.seq_lens > 0, torch.arange(metadata.num_reqs, device=query.device), 0).max()
    end = torch.minimum(metadata.kv_end, metadata.seq_lens[last[None]])
    return TorchReference.forward(self, query, cache, replace(metadata, kv_end=end), **options)


@attends_by
def _live_rows_come_first(metadata: Any, spec: Any) -> Any:
    live = metadata.token_to_req < (metadata.seq_lens > 0).sum()
    end = torch.where(live, metadata.kv_end, 0)
    return replace(metadata, kv_end=end)


@gives
def _rounds_by_the_page(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return out * (1 + 2e-7 * (metadata.block_table[0, 0] % 2))


class _EveryOtherCallRoundsUp(TorchReference):
    name = "every_other_call_rounds_up"

    def __init__(self) -> None:
        self.calls = torch.zeros(())

    def forward(self, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        self.calls.add_(1)
        out = super().forward(query, cache, metadata, spec=spec, sinks=sinks)
        return out * (1 + 2e-7 * (self.calls % 2))


class _AcceptsEverything(TorchReference):
    name = "accepts_everything"

    def supports(self, spec: AttentionSpec, device: torch.device) -> Any:
        from attn_backends import Accepted

        return Accepted()


ATTENTION_MUTANTS = (
    Mutant("top_left_causal", "numerics.attention_is_right", with_forward(_top_left_causal), cases="base-*"),
    Mutant("gqa_interleaved", "numerics.attention_is_right", with_forward(_interleaved_groups), cases="base-*"),
    Mutant(
        "forgets_sinks",
        "numerics.attention_is_right",
        with_forward(_forgets_sinks),
        not_shown="the draft of a backend of keys and values has no sinks",
        cases="sinks-*",
    ),
    Mutant(
        "takes_infinite_sinks_for_large",
        "numerics.infinite_sinks_are_defined",
        with_forward(_takes_infinite_sinks_for_large),
        not_shown="a draft's sinks are finite",
    ),
    Mutant("reads_past_the_end", "poison.stale_table_entries_are_not_read", with_forward(_reads_a_token_too_many)),
    Mutant("reads_unwritten_scratch", "poison.uninitialised_memory_is_not_read", with_forward(_uses_scratch_unwritten)),
    Mutant("checks_no_input", "refusal.bad_tensors_never_reach_a_kernel", with_forward(_checks_nothing)),
    Mutant(
        "live_rows_come_first", "drafter.requests_stop_on_their_own", with_forward(_live_rows_come_first), cases="k4-n7"
    ),
    Mutant("as_long_as_the_last_row", "poison.request_order_does_not_matter", with_forward(_as_long_as_the_last_row)),
    Mutant(
        "rounds_by_the_page",
        "poison.page_order_does_not_matter",
        with_forward(_rounds_by_the_page),
        not_shown="its error is within the budget",
    ),
    Mutant(
        "every_other_call_rounds_up",
        "graph.replay_equals_eager",
        _EveryOtherCallRoundsUp(),
        not_shown="its error is within the budget",
    ),
    Mutant(
        "accepts_everything",
        "refusal.unclaimed_is_refused",
        _AcceptsEverything(),
        not_shown="what a backend accepts is asked before there is a drafter",
    ),
)
