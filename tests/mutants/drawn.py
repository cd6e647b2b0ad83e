"""Backends that are right on every named case, and wrong for a size or a combination that only draws from the claims
reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_backends.torch_reference import TorchReference
from builders import ReferenceBuilder
from tests.mutants.builders import counts_live_rows
from tests.mutants.mutant import Mutant, advance, backend, with_forward

_ATTENTION, _ADVANCE = "numerics.drawn_attention_is_right", "builder.drawn_advances_mean_a_rebuild"
Where = Callable[[Any, Any], Any]
"""Returns whether a spec with its metadata is served wrongly: a bool, or one for each query token."""


def _lens(metadata: Any) -> torch.Tensor:
    """Return the length of each query token's request."""
    return metadata.seq_lens[metadata.token_to_req]


def _query_lens(metadata: Any) -> torch.Tensor:
    return (metadata.query_start_loc[1:] - metadata.query_start_loc[:-1])[metadata.token_to_req]


def _wrong(name: str, where: Where) -> Mutant:
    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
        chosen = torch.as_tensor(where(spec, metadata)).expand(out.shape[0])
        return torch.where(chosen[:, None, None] & (metadata.kv_end > 0)[:, None, None], out + 1, out)

    return Mutant(name, _ATTENTION, with_forward(forward))


groups_of_several_kv_heads = _wrong(
    "groups_of_several_kv_heads", lambda spec, _: spec.num_kv_heads > 1 and spec.group_size not in (1, 2, 4, 8, 16)
)
groups_of_13 = _wrong("groups_of_13", lambda spec, _: spec.group_size == 13)
heads_from_65_on = _wrong("heads_from_65_on", lambda spec, _: spec.num_q_heads > 64)
dims_of_160 = _wrong("dims_of_160", lambda spec, _: spec.head_dim == 160)
pages_of_512 = _wrong("pages_of_512", lambda spec, _: spec.page_size == 512)
lengths_above_4100 = _wrong("lengths_above_4100", lambda _, metadata: _lens(metadata) > 4100)
windows_above_4096 = _wrong(
    "windows_above_4096",
    lambda spec, metadata: (spec.sliding_window or 0) > 4096 and _lens(metadata) > spec.sliding_window,
)
windows_in_pages_of_1 = _wrong(
    "windows_in_pages_of_1", lambda spec, _: spec.page_size == 1 and spec.sliding_window is not None
)
scales_with_sinks = _wrong("scales_with_sinks", lambda spec, _: spec.sinks and spec.scale < 0.9 * spec.head_dim**-0.5)
queries_of_6_to_16 = _wrong(
    "queries_of_6_to_16", lambda _, metadata: (_query_lens(metadata) >= 6) & (_query_lens(metadata) <= 16)
)
as_many_tokens_as_rows = _wrong(
    "as_many_tokens_as_rows",
    lambda _, metadata: metadata.num_tokens == metadata.num_reqs and metadata.max_query_len > 1,
)
tokens_behind_the_last_row = _wrong(
    "tokens_behind_the_last_row", lambda _, metadata: metadata.num_tokens > metadata.query_start_loc[-1]
)
wide_tables = _wrong(
    "wide_tables",
    lambda spec, metadata: metadata.block_table.shape[1] * spec.page_size > 1.9 * metadata.max_seq_len + spec.page_size,
)


@backend(_ATTENTION)
class SpreadsFromDistantRows(TorchReference):
    """One request that is not finite spoils all others, but only in large batches."""

    def forward(self, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
        out = super().forward(query, cache, metadata, **options)
        return out + 0 * out.sum() if metadata.num_reqs > 16 else out


def _keeps(self: Any, metadata: Any, wrong: Any) -> None:
    """Advance, and leave the kv_end of these query tokens as it was."""
    before = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end.copy_(torch.where(torch.as_tensor(wrong), before, metadata.kv_end))


@advance(_ADVANCE)
def odd_pages_stay(self: Any, metadata: Any) -> None:
    _keeps(self, metadata, self.spec.page_size % 2 == 1 and self.spec.page_size > 1)


@advance(_ADVANCE)
def writes_the_batchs_table(self: Any, metadata: Any) -> None:
    """A column that no request of the usual lengths reads."""
    ReferenceBuilder.advance(self, metadata)
    metadata.block_table[:, -1] = 0


@advance(_ADVANCE)
def rows_from_128_on_stay(self: Any, metadata: Any) -> None:
    _keeps(self, metadata, metadata.token_to_req >= 128)


@advance(_ADVANCE)
def a_gap_between_rows_takes_a_token(self: Any, metadata: Any) -> None:
    """Rows behind one that has reached its limit, if each has several query tokens."""
    ReferenceBuilder.advance(self, metadata)
    live = metadata.seq_lens > 0
    gaps = (~live).cumsum(0) > 0
    behind = (live & gaps)[metadata.token_to_req] & (metadata.max_query_len > 1) & (metadata.kv_end > 1)
    metadata.kv_end.sub_(behind.to(metadata.kv_end.dtype))


@advance(_ADVANCE)
def the_third_page_of_64_is_late(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    if self.spec.page_size == 64:
        metadata.kv_end.copy_(torch.where(metadata.kv_end == 129, 128, metadata.kv_end))


@advance("graph.drawn_replays_are_right", build=counts_live_rows)
def capped_rows_of_its_build(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    if self.spec.soft_cap is not None:
        metadata.kv_end[self.live_at_build :] = 0
