import re

import pytest
import torch

from builders import BatchBuffers, BatchError, RequestTables
from tests.factories import make_tables


def empty_tables(max_reqs=3, max_seq_len=16):
    return RequestTables(page_sizes=[4], num_pages=[8], max_reqs=max_reqs, max_seq_len=max_seq_len, device="cpu")


def contents(tables):
    return (
        tables.block_tables.tolist(), tables.token_limits.tolist(), tables.overflow.tolist(), tables.num_live,
        tables.limits_host,
    )  # fmt: skip


def test_a_group_with_too_few_rows_is_refused_beside_one_that_has_them_all():
    tables = RequestTables(page_sizes=[4, 4], num_pages=[8, 8], max_reqs=3, max_seq_len=16, device="cpu")
    with pytest.raises(BatchError, match=re.escape("pages must hold 2 groups of 1 rows, got [1, 0] rows")):
        tables.load([[[0]], []], [4])


def test_everything_that_kernels_read_of_the_tables_is_int32():
    tables = empty_tables()
    read = (tables.block_tables, tables.token_limits, tables.overflow, tables.page_sizes)
    assert [tensor.dtype for tensor in read] == [torch.int32] * 4


REFUSED = {
    "too many requests": (([[[0], [1], [2], [3]]], [4] * 4), "at most 3 requests fit these tables, got 4"),
    "too few groups": (([], [4]), "pages must hold 1 groups of 1 rows"),
    "too few rows": (([[[0]]], [4, 4]), "pages must hold 1 groups of 2 rows, got [1] rows"),
    "limit beyond its pages": (([[[0, 1]]], [9]), "takes 3 pages of 4 in group 0, but has 2"),
    "limit beyond the table": (
        ([[[0, 1, 2, 3]]], [17]),
        "must hold 1 to 16 tokens in at most 4 pages, got 17",
    ),
    "limit of nothing": (([[[0]]], [0]), "must hold 1 to 16 tokens"),
    "more pages than the table": (([[[0, 1, 2, 3, 4]]], [16]), "got 16 tokens in 5 pages"),
    "page id too large": (([[[0, 8]]], [8]), "must be 0 to 7, request 0 names 8"),
    "negative page id": (([[[-1]]], [4]), "must be 0 to 7, request 0 names -1"),
    "shared writable page": (
        ([[[0, 1], [2, 1]]], [8, 8]),
        "page 1 of group 0 is writable by requests 0 and 1",
    ),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_a_table_that_would_let_kernels_stray_is_refused(args, message):
    with pytest.raises(BatchError) as refused:
        empty_tables().load(*args)
    assert message in str(refused.value)


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_nothing_changes_when_a_load_is_refused(args, message):
    tables = empty_tables()
    tables.load([[[5, 6], [7]]], [8, 4])
    tables.overflow.fill_(1)
    before = contents(tables)
    with pytest.raises(BatchError):
        tables.load(*args)
    assert contents(tables) == before


def test_a_read_only_prefix_may_be_shared():
    tables = empty_tables()
    tables.load([[[0, 1, 2], [0, 1, 3]]], [12, 12], writable_from=[8, 9])
    assert tables.block_tables[0, :2, :3].tolist() == [[0, 1, 2], [0, 1, 3]]


def test_a_shared_page_that_one_request_still_writes_is_refused():
    with pytest.raises(BatchError, match="writable by requests 0 and 1"):
        empty_tables().load([[[0, 1, 2], [0, 1, 3]]], [12, 12], writable_from=[7, 7])


@pytest.mark.parametrize("writer", [0, 1])
def test_a_read_prefix_page_that_another_request_writes_is_refused(writer):
    writable_from = [8, 8]
    writable_from[writer] = 0
    with pytest.raises(BatchError, match=f"read by request {1 - writer} and writable by request {writer}"):
        empty_tables().load([[[0, 1, 2], [0, 4, 3]]], [12, 12], writable_from=writable_from)


def test_a_writable_from_of_another_length_is_refused():
    with pytest.raises(BatchError, match="and 1 writable_from"):
        empty_tables().load([[[0], [1]]], [4, 4], writable_from=[0])


def test_page_sizes_and_counts_must_come_in_pairs():
    with pytest.raises(BatchError, match="got 2 sizes and 1 counts"):
        RequestTables(page_sizes=[4, 8], num_pages=[8], max_reqs=1, max_seq_len=8, device="cpu")


def test_padding_rows_own_nothing_and_may_hold_nothing():
    tables = empty_tables()
    tables.load([[[5, 6]]], [7])
    assert tables.block_tables[0].tolist() == [[5, 6, -1, -1], [-1] * 4, [-1] * 4]
    assert tables.token_limits.tolist() == [7, 0, 0]


def test_a_second_load_leaves_nothing_of_the_first():
    tables = empty_tables()
    tables.load([[[0, 1, 2, 3], [4, 5]]], [16, 8])
    tables.load([[[6]]], [4])
    assert tables.block_tables[0].tolist() == [[6, -1, -1, -1], [-1] * 4, [-1] * 4]
    assert (tables.num_live, tables.limits_host) == (1, (4,))


def test_a_load_lowers_the_overflow_flags():
    tables = empty_tables()
    tables.overflow.fill_(1)
    tables.load([[[0]]], [4])
    assert tables.overflow.tolist() == [0, 0, 0]


def test_a_load_keeps_every_address():
    tables = empty_tables()
    before = [t.data_ptr() for t in (tables.block_tables, tables.token_limits, tables.overflow, tables.page_sizes)]
    tables.load([[[0]]], [4])
    after = [t.data_ptr() for t in (tables.block_tables, tables.token_limits, tables.overflow, tables.page_sizes)]
    assert after == before


def test_each_group_has_its_own_pages():
    tables = make_tables([10, 10], page_sizes=(4, 8), max_seq_len=16)
    assert tables.block_tables.dtype == torch.int32
    assert (tables.block_tables[0, 0] >= 0).sum() == 4 and (tables.block_tables[1, 0] >= 0).sum() == 2


def test_a_page_that_one_request_names_twice_is_refused():
    tables = RequestTables(page_sizes=[4], num_pages=[8], max_reqs=1, max_seq_len=16, device="cpu")
    with pytest.raises(BatchError):
        tables.load([[[3, 3]]], [8])


def behind_a_prefix():
    """Buffers of two requests that share a page and may write from positions 4 and 6 on."""
    tables = RequestTables(page_sizes=[4], num_pages=[8], max_reqs=2, max_seq_len=16, device="cpu")
    tables.load([[[0, 1], [0, 2]]], [8, 8], writable_from=[4, 6])
    return BatchBuffers(tables, max_tokens=8)


@pytest.mark.parametrize(
    ("lens", "request_of", "start", "position"), [([3, 1], 0, 4, 3), ([1, 3], 1, 6, 5), ([6, 1], 0, 4, 0)]
)
def test_a_batch_that_writes_before_the_end_of_a_shared_prefix_is_refused(lens, request_of, start, position):
    batch = behind_a_prefix()
    with pytest.raises(BatchError) as refused:
        batch.load(lens, [6, 8])
    assert f"request {request_of} may write from position {start} on, got queries from position {position};" in str(
        refused.value
    )
    assert batch.seq_lens.tolist() == [0, 0]


def test_a_batch_may_write_from_the_end_of_a_shared_prefix_on():
    batch = behind_a_prefix()
    batch.load([2, 2], [6, 8])
    assert batch.slot_mappings[0, :4].tolist() == [4, 5, 10, 11]


@pytest.mark.parametrize(
    ("pages", "limits", "options", "message"),
    [
        ([[[0.5]]], [4], {}, "page ids of group 0 must be ints, got 0.5"),
        ([[["0"]]], [4], {}, "page ids of group 0 must be ints, got '0'"),
        ([[[0]]], [2.5], {}, "token limits and writable_from must be ints, got 2.5"),
        ([[[0]]], [4], {"writable_from": [1.0]}, "must be ints, got 1.0"),
        (
            [[[0, 1], [0, 2]]],
            [8, 8],
            {"writable_from": [-4, -4]},
            "must be positions, 0 to the request's",
        ),
        ([[[0, 1]]], [8], {"writable_from": [9]}, "to the request's token limit, got [9] of limits [8]"),
        ([[[True]]], [4], {}, "page ids of group 0 must be ints, got True"),
        ([[[0]]], [True], {}, "token limits and writable_from must be ints, got True"),
    ],
)
def test_what_a_tensor_of_ints_would_round_or_a_slice_wrap_is_refused(pages, limits, options, message):
    tables = empty_tables()
    with pytest.raises(BatchError, match=re.escape(message)):
        tables.load(pages, limits, **options)
    assert tables.num_live == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"max_reqs": True},
        {"page_sizes": [0]},
        {"num_pages": [-1]},
        {"max_reqs": -1},
        {"max_seq_len": 0},
        {"max_reqs": 1.5},
    ],
)
def test_tables_of_no_size_are_refused_before_anything_is_allocated(changes):
    sizes = {"page_sizes": [4], "num_pages": [8], "max_reqs": 2, "max_seq_len": 16}
    with pytest.raises(BatchError, match=r"page sizes, page counts, max_reqs and max_seq_len must be (1 or more|ints)"):
        RequestTables(**{**sizes, **changes}, device="cpu")


@pytest.mark.parametrize(
    "changes", [{"page_sizes": [1 << 16], "num_pages": [1 << 15]}, {"max_seq_len": 1 << 31, "page_sizes": [1 << 30]}]
)
def test_pools_and_requests_that_an_int32_does_not_count_are_refused(changes):
    sizes = {"page_sizes": [4], "num_pages": [1], "max_reqs": 1, "max_seq_len": 16}
    with pytest.raises(BatchError, match="must hold fewer than 2147483648 tokens, got"):
        RequestTables(**{**sizes, **changes}, device="cpu")


def test_tables_are_filled_from_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        tables = RequestTables(page_sizes=[4], num_pages=[4], max_reqs=1, max_seq_len=16, device=torch.device("cpu"))
        tables.load([[[2]]], [4])
        tables.grow({0: [[1]]}, {0: 8})
        tables.condense([0])
    assert tables.block_tables[0, 0, :2].tolist() == [2, 1] and tables.token_limits.tolist() == [8]
