"""The kit over SGLang's draft backends, as far as it runs without SGLang: `make engines` runs it over them."""

from __future__ import annotations

import pytest
import torch

from engine_kits.sglang.attention import attend, in_pages, listed
from engine_kits.sglang.runner import slots_of
from spec_decode.graphs import runtime_for
from tests.factories import CPU


def test_slots_of_skips_padding_page() -> None:
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    assert slots_of(table, 4).tolist() == [[12, 13, 14, 15, 4, 5, 6, 7]]


def test_listed_reads_slots_beyond_captured_view() -> None:
    slots = torch.arange(10, 16)
    ends = torch.tensor([0, 2, 5])
    assert [row.tolist() for row in listed(ends, slots[:1])] == [[10, 11], [12, 13, 14]]


@pytest.mark.parametrize(("window", "expected"), [(0, [4, 5, 6, 7, 2]), (3, [6, 7, 2])])
def test_in_pages_reads_from_window_to_length(window: int, expected: list[int]) -> None:
    (row,) = in_pages(torch.tensor([[2, 3, 1]]), torch.tensor([5]), 2, window)
    assert row.tolist() == expected


def test_replay_attends_to_current_slots() -> None:
    key, value = torch.randn(4, 1, 8), torch.randn(4, 1, 8)
    query, out = torch.randn(1, 2, 8), torch.zeros(1, 2, 8)
    ends, slots = torch.tensor([0, 1]), torch.tensor([3])
    graph = runtime_for(CPU).capture(
        lambda: attend(out, query, key, value, lambda: listed(ends, slots), (ends, slots), 1.0)
    )
    slots.fill_(2)
    graph.replay()
    torch.testing.assert_close(out, value[2].expand(1, 2, 8))
