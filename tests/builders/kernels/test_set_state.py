import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import BatchBuffers, set_decode_state, set_extend_state
from tests.factories import Shared, make_tables, shared_states, state_of


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


@given(shared_states(), st.integers(1, 5), st.data())
def test_an_extend_follows_the_rule_written_in_plain_python(shared, query_len, data):
    context = data.draw(st.lists(st.integers(0, 30), min_size=shared.rows, max_size=shared.rows))
    batch = shared.buffers(query_len)
    expected = state_of(batch)
    set_extend_state(batch, torch.tensor(context, dtype=torch.int32), shared.num_reqs, query_len)
    extend_by_hand(shared, expected, context, query_len)
    assert state_of(batch) == expected


@given(shared_states(), st.integers(1, 5), st.data())
def test_a_decode_begins_behind_the_accepted_token(shared, query_len, data):
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


def extending(context, limits, query_len=3, **options):
    batch = BatchBuffers(
        make_tables(limits, **options), max_tokens=query_len * (options.get("max_reqs") or len(limits))
    )
    set_extend_state(batch, torch.tensor(context, dtype=torch.int32), batch.max_reqs, query_len)
    return batch


def test_a_row_asks_query_len_tokens_behind_its_context():
    batch = extending([6], [20])
    assert batch.seq_lens.tolist() == [9] and batch.positions.tolist() == [6, 7, 8]


def test_a_row_that_just_fits_under_its_limit_is_live():
    batch = extending([6], [9])
    assert batch.seq_lens.tolist() == [9] and batch.tables.overflow.tolist() == [0]


def test_a_row_that_does_not_fit_is_inert_and_flagged_and_its_neighbour_is_not():
    batch = extending([7, 6], [9, 9])
    assert batch.seq_lens.tolist() == [0, 9]
    assert batch.slot_mappings[0, :3].tolist() == [-1, -1, -1] and batch.positions[:3].tolist() == [0, 0, 0]
    assert batch.tables.overflow.tolist() == [1, 0]


def test_a_page_missing_in_one_group_makes_the_row_inert_in_all():
    batch = BatchBuffers(make_tables([20], page_sizes=(4, 8)), max_tokens=3)
    batch.tables.block_tables[1, 0, 1] = -1
    set_extend_state(batch, torch.tensor([6], dtype=torch.int32), 1, 3)
    assert batch.seq_lens.tolist() == [0] and batch.slot_mappings.tolist() == [[-1] * 3] * 2
    assert batch.tables.overflow.tolist() == [1]


def test_a_padding_row_is_inert_whatever_context_it_was_left_with():
    batch = extending([6, 99], [20], max_reqs=2)
    assert batch.seq_lens.tolist() == [9, 0] and batch.slot_mappings[0, 3:].tolist() == [-1] * 3
    assert batch.tables.overflow.tolist() == [0, 0]


def test_an_extend_leaves_the_draft_column_alone():
    batch = BatchBuffers(make_tables([20]), max_tokens=3)
    batch.step.fill_(2)
    set_extend_state(batch, torch.tensor([6], dtype=torch.int32), 1, 3)
    assert batch.step.tolist() == [2]


def test_a_row_that_was_inert_in_the_extend_stays_inert_in_the_decode():
    extend = extending([7, 6], [9, 20])
    decode = BatchBuffers(extend.tables, max_tokens=2)
    set_decode_state(decode, extend.seq_lens, torch.tensor([2, 2], dtype=torch.int32), 2, 3)
    assert decode.seq_lens.tolist() == [0, 9] and decode.slot_mappings.tolist() == [[-1, -1]]
