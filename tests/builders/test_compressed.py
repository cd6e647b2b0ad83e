"""Lists over a compressed cache, held against a loop over tokens and entries."""

from __future__ import annotations

import pytest
import torch

from builders import BatchError
from builders.compressed import compressed_window, translate_topk
from spec_decode.graphs import runtime_for
from tests.factories import CPU

STARTS, SEQ_LENS = [0, 1, 6, 8, 10, 10], [300, 130, 0, 9, 12]
"""A decode, five queries, a row that became inert, two queries, a row without any; then two tokens of no request."""
POSITIONS = [299, 125, 126, 127, 128, 129, 44, 45, 7, 8, 99, 99]
OWNERS = [0, 1, 1, 1, 1, 1, None, None, 3, 3, None, None]
MAX_SEQ_LEN = 320
GARBAGE = 2**31 - 1


def state():
    """positions, seq_lens, query_start_loc."""
    return torch.tensor(POSITIONS), torch.tensor(SEQ_LENS).int(), torch.tensor(STARTS).int()


def make_table(page_size, ratio):
    columns = -(-(MAX_SEQ_LEN // ratio) // page_size)
    return torch.randperm(5 * columns, generator=torch.Generator().manual_seed(0)).int().view(5, columns)


def slot(table, owner, entry, page_size):
    return int(table[owner, entry // page_size]) * page_size + entry % page_size


def listed(table, ratio, page_size, width=None):
    width = width or MAX_SEQ_LEN // ratio
    indices, lens = torch.full((12, width), 77, dtype=torch.int32), torch.full((12,), 77, dtype=torch.int32)
    compressed_window(indices, lens, *state(), table, ratio=ratio, page_size=page_size, max_seq_len=MAX_SEQ_LEN)
    return indices, lens


def by_hand(table, ratio, page_size):
    """A token sees an entry once the last of the entry's tokens is its own or lies before it."""
    for owner, position in zip(OWNERS, POSITIONS, strict=True):
        entries = range(MAX_SEQ_LEN // ratio) if owner is not None else ()
        yield [slot(table, owner, j, page_size) for j in entries if (j + 1) * ratio - 1 <= position]


@pytest.mark.parametrize("page_size", [1, 2, 64])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_a_token_lists_the_entries_that_are_complete(ratio, page_size):
    table = make_table(page_size, ratio)
    indices, lens = listed(table, ratio, page_size)
    expected = list(by_hand(table, ratio, page_size))
    assert lens.tolist() == [len(seen) for seen in expected]
    assert indices.tolist() == [seen + [-1] * (indices.shape[1] - len(seen)) for seen in expected]
    assert lens[3:5].tolist() == [128 // ratio, 129 // ratio]


def test_a_list_may_be_wider_than_a_launch_s_block():
    table = make_table(2, 1)
    narrow, wide = listed(table, 1, 2), listed(table, 1, 2, width=2112)
    assert torch.equal(wide[0][:, :320], narrow[0]) and torch.equal(wide[1], narrow[1])
    assert wide[0][:, 320:].eq(-1).all()


def test_pages_behind_the_complete_entries_are_not_followed():
    table = make_table(2, 4)
    clean = listed(table, 4, 2)
    for owner, length in enumerate(SEQ_LENS):
        table[owner, -(-(length // 4) // 2) :] = GARBAGE
    table[4] = GARBAGE
    assert all(torch.equal(found, was) for found, was in zip(listed(table, 4, 2), clean, strict=True))


def test_a_captured_listing_replays_over_another_batch():
    table = make_table(2, 4)
    indices, lens = torch.zeros(12, 80, dtype=torch.int32), torch.zeros(12, dtype=torch.int32)
    positions, seq_lens, starts = state()
    seq_lens.zero_()
    graph = runtime_for(CPU).capture(
        lambda: compressed_window(
            indices, lens, positions, seq_lens, starts, table, ratio=4, page_size=2, max_seq_len=MAX_SEQ_LEN
        )
    )
    seq_lens.copy_(state()[1])
    graph.replay()
    expected = listed(table, 4, 2)
    assert torch.equal(indices, expected[0]) and torch.equal(lens, expected[1])


def test_lists_too_narrow_for_the_longest_request_are_refused_with_nothing_listed():
    indices, lens = torch.full((12, 79), 77, dtype=torch.int32), torch.full((12,), 77, dtype=torch.int32)
    with pytest.raises(BatchError, match="must hold the 320 // 4 entries of the longest request, got a width of 79"):
        compressed_window(indices, lens, *state(), make_table(2, 4), ratio=4, page_size=2, max_seq_len=MAX_SEQ_LEN)
    assert indices.eq(77).all() and lens.eq(77).all()


def make_topk(width=5):
    """Entry numbers below each live token's, in no order and with gaps; garbage where no request lives."""
    generator = torch.Generator().manual_seed(1)
    topk = torch.full((12, width), GARBAGE, dtype=torch.int32)
    for token, owner in enumerate(OWNERS):
        if owner is not None:
            seen = (POSITIONS[token] + 1) // 4
            topk[token] = torch.randint(-1, max(seen, 1), (width,), generator=generator)
    return topk


@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_entry_numbers_become_slots_in_their_order(page_size):
    table, topk = make_table(page_size, 4), make_topk()
    _, seq_lens, starts = state()
    found = translate_topk(topk, seq_lens, starts, table, page_size=page_size)
    assert found.dtype == torch.int32
    assert found.tolist() == [
        [-1 if owner is None or entry < 0 else slot(table, owner, entry, page_size) for entry in row]
        for owner, row in zip(OWNERS, topk.tolist(), strict=True)
    ]
    assert found.eq(-1).any() and found.ge(0).any()


def test_entry_numbers_may_be_strided():
    table, topk = make_table(2, 4), make_topk()
    _, seq_lens, starts = state()
    found = translate_topk(topk.t().contiguous().t(), seq_lens, starts, table, page_size=2)
    assert torch.equal(found, translate_topk(topk, seq_lens, starts, table, page_size=2))


def compressed_args():
    return torch.zeros(12, 80).int(), torch.zeros(12).int(), *state(), make_table(2, 4), 4, 2


def topk_args():
    return make_topk(), *state()[1:], make_table(2, 4), 2


OPS = {"compressed_window": compressed_args, "translate_topk": topk_args}


@pytest.mark.parametrize(("name", "args"), OPS.items(), ids=OPS)
def test_an_op_writes_what_its_schema_says_and_its_fake_matches(name, args):
    op = getattr(torch.ops.builders, name).default
    torch.library.opcheck(op, args(), test_utils=("test_schema", "test_faketensor"))
