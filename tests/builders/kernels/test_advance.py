import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchBuffers, advance_state
from tests.factories import Shared, make_tables, shared_states, state_of


def advance_by_hand(shared: Shared, state: dict) -> None:
    """The rule in plain Python: one row at a time, in place on `state`."""
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


@given(shared_states(), st.integers(1, 6))
def test_advancing_follows_the_rule_written_in_plain_python(shared, steps):
    batch = shared.buffers()
    expected = state_of(batch)
    for _ in range(steps):
        advance_state(batch, shared.num_reqs)
        advance_by_hand(shared, expected)
        assert state_of(batch) == expected


@given(shared_states(), st.integers(1, 6))
def test_no_slot_ever_lies_outside_the_pages_of_its_row(shared, steps):
    batch = shared.buffers()
    for _ in range(steps):
        advance_state(batch, shared.num_reqs)
        for group, size in enumerate(shared.page_sizes):
            for row in range(shared.num_reqs):
                slot = int(batch.slot_mappings[group, row])
                assert slot == -1 or slot // size in shared.table[group][row]


@given(shared_states(), st.integers(1, 4))
def test_tables_and_limits_are_only_read(shared, steps):
    batch = shared.buffers()
    for _ in range(steps):
        advance_state(batch, shared.num_reqs)
    assert batch.tables.block_tables.tolist() == shared.table
    assert batch.tables.token_limits.tolist() == shared.limits


def decoding(seq_lens, limits, **options):
    batch = BatchBuffers(make_tables(limits, **options), max_tokens=len(limits))
    batch.load([1] * len(seq_lens), seq_lens)
    return batch


def test_a_live_row_moves_one_token_forward():
    batch = decoding([5], [9])
    advance_state(batch, 1)
    assert (batch.seq_lens.tolist(), batch.positions.tolist(), batch.step.tolist()) == ([6], [5], [1])


def test_a_row_crosses_a_page_edge_into_its_next_page():
    batch = decoding([4], [9])
    advance_state(batch, 1)
    assert batch.slot_mappings[0, 0] == batch.tables.block_tables[0, 0, 1] * 4


def test_a_padding_row_stays_inert_and_raises_no_flag():
    batch = decoding([5], [9], max_reqs=2)
    batch = BatchBuffers(batch.tables, max_tokens=2)
    batch.load([1], [5], pad_reqs=2)
    advance_state(batch, 2)
    assert batch.seq_lens[1] == 0 and batch.slot_mappings[0, 1] == -1 and batch.tables.overflow[1] == 0


def test_a_row_at_its_limit_becomes_inert_and_is_flagged():
    batch = decoding([9, 5], [9, 9])
    advance_state(batch, 2)
    assert batch.seq_lens.tolist() == [0, 6]
    assert batch.slot_mappings[0, 0] == -1
    assert batch.tables.overflow.tolist() == [1, 0]


def test_an_inert_row_never_comes_back():
    batch = decoding([9], [9])
    for _ in range(3):
        advance_state(batch, 1)
        assert batch.seq_lens.tolist() == [0]


def test_the_flag_stays_up_until_the_tables_are_loaded_again():
    batch = decoding([9], [9])
    for _ in range(3):
        advance_state(batch, 1)
        assert batch.tables.overflow.tolist() == [1]


@pytest.mark.parametrize("group", [0, 1])
def test_a_page_missing_in_one_of_two_groups_stops_the_row_in_both(group):
    batch = decoding([8], [16], page_sizes=(4, 8))
    batch.tables.block_tables[group, 0, 8 // (4, 8)[group]] = -1
    advance_state(batch, 1)
    assert batch.slot_mappings[:, 0].tolist() == [-1, -1]
    assert batch.seq_lens.tolist() == [0] and batch.tables.overflow.tolist() == [1]


def test_a_row_stopped_on_its_way_keeps_a_position_that_the_model_knows():
    batch = decoding([62], [64])
    for _ in range(4):
        advance_state(batch, 1)
        assert 0 <= batch.positions[0] < 64


def test_the_step_moves_once_however_many_rows_there_are():
    batch = decoding([1] * 130, [4] * 130, max_seq_len=4)
    advance_state(batch, 130)
    assert batch.step.tolist() == [1]


def test_rows_behind_the_batch_are_left_alone():
    batch = decoding([5, 5], [9, 9])
    advance_state(batch, 1)
    assert batch.seq_lens.tolist() == [6, 5]


def test_every_address_stays():
    batch = decoding([5], [9])
    tensors = (batch.seq_lens, batch.positions, batch.slot_mappings, batch.step)
    before = [t.data_ptr() for t in tensors]
    advance_state(batch, 1)
    assert [t.data_ptr() for t in (batch.seq_lens, batch.positions, batch.slot_mappings, batch.step)] == before


def test_the_result_does_not_depend_on_what_positions_and_slots_held():
    batch, other = decoding([5], [9]), decoding([5], [9])
    other.positions.fill_(99)
    other.slot_mappings.fill_(99)
    advance_state(batch, 1)
    advance_state(other, 1)
    assert state_of(batch) == state_of(other)
