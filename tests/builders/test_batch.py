import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import AttentionBatch, BatchBuffers, BatchError, check_batch
from tests.factories import make_tables, state_of


@st.composite
def batches(draw):
    count = draw(st.integers(1, 4))
    seq_lens = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    query_lens = [draw(st.integers(1, n)) for n in seq_lens]
    page_sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3))
    return query_lens, seq_lens, page_sizes


def buffers(limits=(30, 30), *, max_reqs=4, max_tokens=40, page_sizes=(4,)):
    tables = make_tables(limits, page_sizes=page_sizes, max_reqs=max_reqs, max_seq_len=32)
    return BatchBuffers(tables, max_tokens=max_tokens)


@given(batches())
def test_slots_and_positions_are_the_page_tables_own_arithmetic(drawn):
    query_lens, seq_lens, page_sizes = drawn
    batch = buffers([30] * len(seq_lens), max_tokens=150, page_sizes=page_sizes)
    batch.load(query_lens, seq_lens)
    token = 0
    for request, (query, seq) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(seq - query, seq):
            assert batch.positions[token] == position
            for group, size in enumerate(page_sizes):
                page = int(batch.tables.block_tables[group, request, position // size])
                assert batch.slot_mappings[group, token] == page * size + position % size
            token += 1
    assert (batch.slot_mappings[:, token:] == -1).all() and (batch.positions[token:] == 0).all()


@given(batches())
def test_no_two_tokens_share_a_slot(drawn):
    query_lens, seq_lens, page_sizes = drawn
    batch = buffers([30] * len(seq_lens), max_tokens=150, page_sizes=page_sizes)
    _, num_tokens = batch.load(query_lens, seq_lens)
    for row in batch.slot_mappings[:, :num_tokens].tolist():
        assert len(set(row)) == num_tokens


def test_padding_rows_of_a_uniform_batch_own_query_len_tokens_each():
    batch = buffers()
    assert batch.load([2, 2], [5, 9], pad_reqs=4) == (4, 8)
    assert batch.query_start_loc.tolist() == [0, 2, 4, 6, 8]


def test_padding_rows_of_a_ragged_batch_repeat_the_end():
    batch = buffers()
    assert batch.load([2, 3], [5, 9], pad_reqs=4) == (4, 5)
    assert batch.query_start_loc.tolist() == [0, 2, 5, 5, 5]


def test_rows_behind_an_unpadded_batch_repeat_the_end():
    batch = buffers()
    assert batch.load([2, 2], [5, 9]) == (2, 4)
    assert batch.query_start_loc.tolist() == [0, 2, 4, 4, 4]


def test_padding_rows_are_inert_in_every_field():
    batch = buffers()
    batch.load([2, 2], [5, 9], pad_reqs=4)
    assert batch.seq_lens.tolist() == [5, 9, 0, 0]
    assert batch.positions[4:].tolist() == [0] * 36
    assert batch.slot_mappings[0, 4:].tolist() == [-1] * 36


def test_a_second_load_leaves_nothing_of_the_first():
    batch = buffers()
    batch.load([8, 8], [20, 30])
    batch.load([1], [3])
    assert batch.seq_lens.tolist() == [3, 0, 0, 0]
    assert (batch.slot_mappings[0, 1:] == -1).all() and (batch.positions[1:] == 0).all()


def test_a_load_starts_at_draft_column_zero():
    batch = buffers()
    batch.step.fill_(3)
    batch.load([1], [3])
    assert batch.step.tolist() == [0]


REFUSED = {
    "empty batch": (([], []), {}, "a batch has 1 to 2 requests"),
    "more requests than tables": (([1] * 3, [1] * 3), {}, "got 3 and 3"),
    "lengths do not pair up": (([1, 1], [4]), {}, "got 2 and 1"),
    "padded below its size": (([1, 1], [4, 4]), {"pad_reqs": 1}, "padded to 1"),
    "padded beyond the buffers": (([1, 1], [4, 4]), {"pad_reqs": 5}, "padded to 5"),
    "a length that is no int": (([1, 1.0], [4, 4]), {}, "lengths must be ints, got 1.0"),
    "zero-length query": (
        ([1, 0], [4, 4]),
        {},
        "request 1 needs 1 <= query length <= sequence length, got 0 and 4",
    ),
    "query longer than its sequence": (([5, 1], [4, 4]), {}, "request 0 needs"),
    "beyond the limit": (([1, 1], [4, 31]), {}, "request 1 may hold 30 tokens, got a sequence of 31"),
    "too many tokens": (([20, 21], [30, 30]), {}, "hold 40 query tokens, the padded batch has 41"),
    "too many tokens by padding": (([11, 11], [30, 30]), {"pad_reqs": 4}, "the padded batch has 44"),
}


@pytest.mark.parametrize(("args", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_batch_that_must_not_reach_a_kernel_is_refused(args, options, message):
    with pytest.raises(BatchError) as refused:
        buffers().load(*args, **options)
    assert message in str(refused.value)


@pytest.mark.parametrize(("args", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_batch_leaves_the_buffers_unchanged(args, options, message):
    batch = buffers()
    batch.load([2, 3], [5, 9])
    batch.step.fill_(2)
    before = state_of(batch)
    with pytest.raises(BatchError):
        batch.load(*args, **options)
    assert state_of(batch) == before


def test_the_host_knows_the_query_lengths_of_a_ragged_batch_and_of_its_padding():
    batch = buffers()
    num_reqs, num_tokens = batch.load([2, 3], [5, 9], pad_reqs=3)
    view = batch.view(0, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=3, uniform=False)
    assert view.host_query_lens == (2, 3, 0)


def test_rows_that_were_not_loaded_have_no_tokens_on_the_host_either():
    batch = buffers()
    batch.load([2], [5])
    assert batch.view(0, num_reqs=3, num_tokens=2, max_query_len=2, uniform=False).host_query_lens == (2, 0, 0)


def test_the_host_knows_the_query_lengths_of_a_uniform_batch_whose_lengths_are_the_devices():
    batch = buffers()
    batch.load([2, 3], [5, 9])
    batch.set_uniform(3)
    assert batch.view(0, num_reqs=2, num_tokens=6, max_query_len=3).host_query_lens == (3, 3)


def test_set_uniform_gives_every_row_query_len_tokens():
    batch = buffers()
    batch.set_uniform(3)
    assert batch.query_start_loc.tolist() == [0, 3, 6, 9, 12]


def test_clear_makes_every_row_padding_and_keeps_the_shape():
    batch = buffers()
    batch.load([2, 2], [5, 9], pad_reqs=4)
    batch.step.fill_(2)
    batch.clear()
    found = state_of(batch)
    assert found["query_start_loc"] == [0, 2, 4, 6, 8]
    assert set(found["seq_lens"]) == {0} and set(found["positions"]) == {0} and found["step"] == [0]
    assert {slot for row in found["slot_mappings"] for slot in row} == {-1}


def test_a_view_is_of_the_buffers_and_never_a_copy():
    batch = buffers(page_sizes=(4, 8))
    num_reqs, num_tokens = batch.load([2, 2], [5, 9], pad_reqs=3)
    view = batch.view(1, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=2)
    assert view.seq_lens.data_ptr() == batch.seq_lens.data_ptr()
    assert view.positions.data_ptr() == batch.positions.data_ptr()
    assert view.slot_mapping.data_ptr() == batch.slot_mappings[1].data_ptr()
    assert view.block_table.data_ptr() == batch.tables.block_tables[1].data_ptr()
    assert view.query_start_loc.data_ptr() == batch.query_start_loc.data_ptr()


def test_a_view_is_bounded_by_the_tables_unless_told_otherwise():
    batch = buffers()
    batch.load([1], [3])
    assert batch.view(0, num_reqs=1, num_tokens=1, max_query_len=1).max_seq_len == 32
    assert batch.view(0, num_reqs=1, num_tokens=1, max_query_len=1, max_seq_len=5).max_seq_len == 5


def test_a_view_has_one_entry_per_row_and_token():
    batch = buffers()
    batch.load([2, 2], [5, 9], pad_reqs=3)
    view = batch.view(0, num_reqs=3, num_tokens=6, max_query_len=2)
    shapes = [
        len(t) for t in (view.query_start_loc, view.seq_lens, view.positions, view.block_table, view.slot_mapping)
    ]
    assert shapes == [4, 3, 6, 3, 6]


def of_an_engine(**changes):
    """A batch of two rows over tensors that no `BatchBuffers` made; the rows of its table lie apart."""
    table = torch.arange(14, dtype=torch.int32).view(2, 7)[:, :4]
    fields = {
        "num_reqs": 2,
        "num_tokens": 2,
        "max_query_len": 1,
        "max_seq_len": 16,
        "uniform": True,
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 5], dtype=torch.int32),
        "positions": torch.tensor([2, 4]),
        "block_table": table,
        "slot_mapping": torch.tensor([2, 4]),
    }
    return AttentionBatch(**{**fields, **changes})


def test_a_batch_over_an_engines_tensors_is_accepted():
    check_batch(of_an_engine(), torch.device("cpu"))


def test_positions_may_be_left_out():
    check_batch(of_an_engine(positions=torch.empty(0, dtype=torch.int64)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"query_start_loc": torch.tensor([0, 1], dtype=torch.int32)}, r"query_start_loc must be .* \[3\]"),
        ({"seq_lens": torch.tensor([3, 5])}, r"seq_lens must be torch.int32 .* got torch.int64"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, r"block_table must be .* got torch.int32 \[3, 4\]"),
        ({"slot_mapping": torch.tensor([2, 4, 6])}, r"slot_mapping must be torch.int64 \[2\]"),
        ({"positions": torch.tensor([2, 4], dtype=torch.int32)}, r"positions must be torch.int64"),
        ({"block_table": torch.zeros(4, 2, dtype=torch.int32).t()}, r"got strides \(1, 2\)"),
        ({"seq_lens": torch.zeros(4, dtype=torch.int32)[::2]}, r"all other tensors of a batch must be contiguous"),
        ({"max_query_len": 2}, r"2 rows of 2 tokens has 4, got 2; .* Say uniform=False"),
    ],
)
def test_tensors_that_a_kernel_would_misread_are_refused(changes, found):
    with pytest.raises(BatchError, match=found):
        check_batch(of_an_engine(**changes), torch.device("cpu"))
