"""The operations on shared state, compared with their rules in plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchBuffers, BatchError, advance_state, set_decode_state, set_extend_state
from tests.factories import Shared, make_tables, shared_states, state_of


def advance_by_hand(shared: Shared, state: dict) -> None:
    """One row at a time, in place on `state`."""
    for row in range(shared.num_reqs):
        position = state["seq_lens"][row]
        moves = position > 0 and shared.owns(row, position)
        if position > 0 and not moves:
            state["overflow"][row] = 1
        state["seq_lens"][row] = position + 1 if moves else 0
        if moves:
            state["positions"][row] = position
        for group in range(len(shared.page_sizes)):
            state["slot_mappings"][group][row] = shared.slot(group, row, position) if moves else -1
    state["step"][0] += 1


def extend_by_hand(shared: Shared, state: dict, context: list[int], query_len: int) -> None:
    for row in range(shared.num_reqs):
        positions = range(context[row], context[row] + query_len)
        live = shared.limits[row] > 0
        fits = live and all(shared.owns(row, position) for position in positions)
        if live and not fits:
            state["overflow"][row] = 1
        state["seq_lens"][row] = context[row] + query_len if fits else 0
        for query, position in enumerate(positions):
            token = row * query_len + query
            state["positions"][token] = position if fits else 0
            for group in range(len(shared.page_sizes)):
                state["slot_mappings"][group][token] = shared.slot(group, row, position) if fits else -1


def decode_by_hand(num_reqs: int, state: dict, extended: list[int], accepted: list[int], query_len: int) -> None:
    for row in range(num_reqs):
        live = extended[row] > 0
        position = extended[row] - query_len + min(max(accepted[row], 0), query_len - 1)
        state["seq_lens"][row] = position + 1 if live else 0
        state["positions"][row] = position if live else 0
        for slots in state["slot_mappings"]:
            slots[row] = -1
    state["step"][0] = 0


def addresses(batch):
    return [getattr(batch, name).data_ptr() for name in ("seq_lens", "positions", "slot_mappings", "step")]


@given(shared_states(), st.integers(1, 6))
def test_advance_state_follows_rule_in_place(shared, steps):
    batch = shared.buffers()
    expected, before = state_of(batch), addresses(batch)
    for _ in range(steps):
        advance_state(batch, shared.num_reqs)
        advance_by_hand(shared, expected)
        assert state_of(batch) == expected
    assert addresses(batch) == before
    assert (batch.tables.block_tables.tolist(), batch.tables.token_limits.tolist()) == (shared.table, shared.limits)


@given(shared_states(), st.integers(1, 5), st.data())
def test_an_extend_follows_the_rule(shared, query_len, data):
    context = data.draw(st.lists(st.integers(0, 30), min_size=shared.rows, max_size=shared.rows))
    batch = shared.buffers(query_len)
    expected = state_of(batch)
    set_extend_state(batch, torch.tensor(context, dtype=torch.int32), shared.num_reqs, query_len)
    extend_by_hand(shared, expected, context, query_len)
    assert state_of(batch) == expected


@given(shared_states(), st.integers(1, 5), st.data())
def test_decode_state_starts_after_accepted_token(shared, query_len, data):
    lengths = st.one_of(st.just(0), st.integers(query_len, query_len + 20))
    extended = data.draw(st.lists(lengths, min_size=shared.rows, max_size=shared.rows))
    counts = st.one_of(st.integers(-2, query_len + 1), st.sampled_from([-(2**31), 2**31 - 1]))
    accepted = data.draw(st.lists(counts, min_size=shared.rows, max_size=shared.rows))
    batch = shared.buffers()
    batch.step.fill_(3)
    expected = state_of(batch)
    tensors = [torch.tensor(values, dtype=torch.int32) for values in (extended, accepted)]
    set_decode_state(batch, *tensors, shared.num_reqs, query_len)
    decode_by_hand(shared.num_reqs, expected, extended, accepted, query_len)
    assert state_of(batch) == expected


@pytest.mark.parametrize("group", [0, 1])
def test_missing_page_stops_row_in_both_groups(group):
    batch = BatchBuffers(make_tables([16, 16], page_sizes=(4, 8)), max_tokens=2)
    batch.load([1, 1], [8, 4])
    batch.tables.block_tables[group, 0, 8 // (4, 8)[group]] = -1
    advance_state(batch, 2)
    assert batch.slot_mappings[:, 0].tolist() == [-1, -1] and (batch.slot_mappings[:, 1] >= 0).all()
    assert batch.seq_lens.tolist() == [0, 5] and batch.tables.overflow.tolist() == [1, 0]


def test_row_over_its_limit_is_padded_and_flagged():
    batch = BatchBuffers(make_tables([9, 9], max_reqs=3), max_tokens=9)
    set_extend_state(batch, torch.tensor([7, 6, 99], dtype=torch.int32), 3, 3)
    assert batch.seq_lens.tolist() == [0, 9, 0] and batch.tables.overflow.tolist() == [1, 0, 0]
    assert batch.positions.tolist() == [0, 0, 0, 6, 7, 8, 0, 0, 0]
    assert batch.slot_mappings[0, :3].tolist() == batch.slot_mappings[0, 6:].tolist() == [-1] * 3
    decode = BatchBuffers(batch.tables, max_tokens=3)
    set_decode_state(decode, batch.seq_lens, torch.tensor([2, 2, 2], dtype=torch.int32), 3, 3)
    assert decode.seq_lens.tolist() == [0, 9, 0] and decode.slot_mappings.tolist() == [[-1] * 3]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


BEYOND = {
    "more tokens than are held": (lambda batch: set_extend_state(batch, int32(1, 1), 2, 2), "got 2 and 4"),
    "more rows to extend": (lambda batch: set_extend_state(batch, int32(1, 1, 1), 3, 1), "got 3 and 3"),
    "more rows to decode": (lambda batch: set_decode_state(batch, int32(3, 3, 3), int32(1, 1, 1), 3, 2), "got 3 and 3"),
    "more rows to advance": (lambda batch: advance_state(batch, 3), "got 3 and 3"),
    "more tokens to view": (lambda batch: batch.view(0, num_reqs=2, num_tokens=4, max_query_len=2), "got 2 and 4"),
    "too few contexts": (
        lambda batch: set_extend_state(batch, int32(1), 2, 1),
        "context_lens must be .* of at least 2 rows",
    ),
    "contexts apart": (lambda batch: set_extend_state(batch, int32(1, 9, 1, 9)[::2], 2, 1), "context_lens must be"),
    "contexts of 64 bits": (lambda batch: set_extend_state(batch, torch.tensor([1, 1]), 2, 1), "got torch.int64"),
    "too few lengths": (lambda batch: set_decode_state(batch, int32(3), int32(1, 1), 2, 2), "extend_seq_lens must be"),
    "too few counts": (lambda batch: set_decode_state(batch, int32(3, 3), int32(1), 2, 2), "accepted must be"),
}


@pytest.mark.parametrize(("change", "message"), BEYOND.values(), ids=BEYOND)
def test_out_of_bounds_state_is_rejected_unchanged(change, message):
    batch = BatchBuffers(make_tables([9, 9], max_reqs=2), max_tokens=2)
    batch.load([1, 1], [4, 5])
    before = state_of(batch)
    with pytest.raises(BatchError, match=message):
        change(batch)
    assert state_of(batch) == before
