import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import AttentionBatch, BatchBuffers, BatchError, RequestTables, check_batch
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
def test_slots_and_positions_match_page_arithmetic(drawn):
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
    assert all(len(set(slots)) == token for slots in batch.slot_mappings[:, :token].tolist())


@pytest.mark.parametrize(
    ("query_lens", "pad_reqs", "size", "starts"),
    [
        pytest.param([2, 2], 4, (4, 8), [0, 2, 4, 6, 8], id="uniform: padding rows own as many tokens as the others"),
        pytest.param([2, 3], 4, (4, 5), [0, 2, 5, 5, 5], id="ragged: they repeat the end"),
        pytest.param([2, 2], None, (2, 4), [0, 2, 4, 4, 4], id="unpadded: the rows behind it repeat the end"),
    ],
)
def test_load_clears_padding_rows(query_lens, pad_reqs, size, starts):
    batch = buffers([30] * 3)
    batch.load([8, 8, 8], [20, 30, 8])
    batch.step.fill_(3)
    batch.tree_masks.fill_(1)
    assert batch.load(query_lens, [5, 9], pad_reqs=pad_reqs) == size
    found = state_of(batch)
    assert found["query_start_loc"] == starts and found["seq_lens"] == [5, 9, 0, 0] and found["step"] == [0]
    live = sum(query_lens)
    assert not batch.tree_masks.any()
    assert set(found["positions"][live:]) == {0} and set(found["slot_mappings"][0][live:]) == {-1}


def behind_a_prefix():
    """Buffers of two requests that share a page and may write from positions 4 and 6 on."""
    tables = RequestTables(page_sizes=[4], num_pages=[8], max_reqs=2, max_seq_len=16, device="cpu")
    tables.load([[[0, 1], [0, 2]]], [8, 8], writable_from=[4, 6])
    return BatchBuffers(tables, max_tokens=8)


def test_batch_may_write_after_shared_prefix():
    batch = behind_a_prefix()
    batch.load([2, 2], [6, 8])
    assert batch.slot_mappings[0, :4].tolist() == [4, 5, 10, 11]


REFUSED = {
    "empty batch": (([], []), {}, "a batch has 1 to 2 requests"),
    "more requests than tables": (([1] * 3, [1] * 3), {}, "got 3 and 3"),
    "lengths do not pair up": (([1, 1], [4]), {}, "got 2 and 1"),
    "padded below its size": (([1, 1], [4, 4]), {"pad_reqs": 1}, "padded to 1"),
    "padded beyond the buffers": (([1, 1], [4, 4]), {"pad_reqs": 5}, "padded to 5"),
    "a length that is no int": (([1, 1.0], [4, 4]), {}, "lengths must be ints, got 1.0"),
    "zero-length query": (([1, 0], [4, 4]), {}, "request 1 needs 1 <= query length <= sequence length, got 0 and 4"),
    "query longer than its sequence": (([5, 1], [4, 4]), {}, "request 0 needs"),
    "beyond the limit": (([1, 1], [4, 31]), {}, "request 1 can hold 30 tokens, got a sequence of 31"),
    "too many tokens": (([20, 21], [30, 30]), {}, "hold 40 query tokens, the padded batch has 41"),
    "too many tokens by padding": (([11, 11], [30, 30]), {"pad_reqs": 4}, "the padded batch has 44"),
}
IN_A_PREFIX = {
    "the first's": (([3, 1], [6, 8]), {}, "request 0 can write from position 4 on, got queries from position 3;"),
    "the second's": (([1, 3], [6, 8]), {}, "request 1 can write from position 6 on, got queries from position 5;"),
    "all of it": (([6, 1], [6, 8]), {}, "request 0 can write from position 4 on, got queries from position 0;"),
}


@pytest.mark.parametrize(
    ("make", "args", "options", "message"),
    [
        pytest.param(make, *refused, id=name)
        for make, table in ((buffers, REFUSED), (behind_a_prefix, IN_A_PREFIX))
        for name, refused in table.items()
    ],
)
def test_invalid_load_is_rejected_unchanged(make, args, options, message):
    batch = make()
    batch.load([1, 2], [5, 8])
    batch.step.fill_(2)
    before = state_of(batch)
    with pytest.raises(BatchError) as refused:
        batch.load(*args, **options)
    assert message in str(refused.value) and state_of(batch) == before


def test_host_knows_query_lengths_of_every_row():
    batch = buffers()

    def known(num_reqs, num_tokens):
        return batch.view(0, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=3, uniform=False).host_query_lens

    assert known(*batch.load([2, 3], [5, 9], pad_reqs=3)) == (2, 3, 0)
    batch.load([2], [5])
    assert known(3, 2) == (2, 0, 0)
    batch.set_uniform(3)
    assert known(2, 6) == (3, 3) and batch.query_start_loc.tolist() == [0, 3, 6, 9, 12]


def test_clear_makes_every_row_padding_and_keeps_shape():
    batch = buffers()
    batch.load([2, 2], [5, 9], pad_reqs=4)
    batch.step.fill_(2)
    batch.clear()
    found = state_of(batch)
    assert found["query_start_loc"] == [0, 2, 4, 6, 8]
    assert set(found["seq_lens"]) == {0} and set(found["positions"]) == {0} and found["step"] == [0]
    assert {slot for row in found["slot_mappings"] for slot in row} == {-1}


def test_view_shares_memory_with_buffers():
    batch = buffers(page_sizes=(4, 8))
    num_reqs, num_tokens = batch.load([2, 2], [5, 9], pad_reqs=3)
    view = batch.view(1, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=2)
    wholes = {
        "query_start_loc": (batch.query_start_loc, 4),
        "seq_lens": (batch.seq_lens, 3),
        "positions": (batch.positions, 6),
        "block_table": (batch.tables.block_tables[1], 3),
        "slot_mapping": (batch.slot_mappings[1], 6),
    }
    for name, (whole, entries) in wholes.items():
        part = getattr(view, name)
        assert (part.data_ptr(), len(part)) == (whole.data_ptr(), entries), name
    assert view.max_seq_len == 32
    bounded = batch.view(0, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=2, max_seq_len=5)
    assert bounded.max_seq_len == 5


def of_an_engine(**changes):
    """A batch of two rows over tensors that no `BatchBuffers` made; the rows of its table lie apart."""
    table = torch.arange(14, dtype=torch.int32).view(2, 7)[:, :4]
    fields = {
        **{"num_reqs": 2, "num_tokens": 2, "max_query_len": 1, "max_seq_len": 16, "uniform": True},
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 5], dtype=torch.int32),
        "positions": torch.tensor([2, 4]),
        "block_table": table,
        "slot_mapping": torch.tensor([2, 4]),
    }
    return AttentionBatch(**{**fields, **changes})


@pytest.mark.parametrize("left_out", [{}, {"positions": torch.empty(0, dtype=torch.int64)}])
def test_engine_batch_passes_with_or_without_positions(left_out):
    check_batch(of_an_engine(**left_out), torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": torch.tensor([0, 1], dtype=torch.int32)}, r"query_start_loc must be .* \[3\]"),
        ({"seq_lens": torch.tensor([3, 5])}, r"seq_lens must be torch.int32 .* got torch.int64"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, r"block_table must be .* got torch.int32 \[3, 4\]"),
        ({"slot_mapping": torch.tensor([2, 4, 6])}, r"slot_mapping must be torch.int64 \[2\]"),
        ({"positions": torch.tensor([2, 4], dtype=torch.int32)}, r"positions must be torch.int64"),
        ({"block_table": torch.zeros(4, 2, dtype=torch.int32).t()}, r"got strides \(1, 2\)"),
        ({"seq_lens": torch.zeros(4, dtype=torch.int32)[::2]}, r"all other tensors of a batch must be contiguous"),
        ({"max_query_len": 2}, r"2 rows of 2 tokens has 4, got num_tokens=2; .* Pass uniform=False"),
    ],
)
def test_misread_batch_tensors_are_rejected(changes, message):
    with pytest.raises(BatchError, match=message):
        check_batch(of_an_engine(**changes), torch.device("cpu"))
