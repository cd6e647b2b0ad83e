import pytest
import torch

from builders import BatchError, RequestTables


def loaded(groups=2):
    tables = RequestTables(
        page_sizes=[4] * groups, num_pages=[12] * groups, max_reqs=3, max_seq_len=20, device="cpu"
    )  # fmt: skip
    tables.load([[[0, 1], [2]]] * groups, [6, 4])
    return tables


def contents(tables):
    return (
        tables.block_tables.tolist(), tables.token_limits.tolist(), tables.limits_host, tables.longest, tables.num_live,
    )  # fmt: skip


def test_growth_appends_pages_and_raises_limits_in_place():
    tables = loaded()
    addresses = tables.block_tables.data_ptr(), tables.token_limits.data_ptr()
    tables.grow({1: [[7, 5], [3, 9]]}, {1: 11})
    assert tables.block_tables[0].tolist() == [[0, 1, -1, -1, -1], [2, 7, 5, -1, -1], [-1] * 5]
    assert tables.block_tables[1, 1].tolist() == [2, 3, 9, -1, -1]
    assert tables.token_limits.tolist() == [6, 11, 0]
    assert (tables.limits_host, tables.longest) == ((6, 11), 11)
    assert addresses == (tables.block_tables.data_ptr(), tables.token_limits.data_ptr())


def test_a_request_grows_again_behind_what_it_has():
    tables = loaded(1)
    tables.grow({0: [[4]]}, {0: 12})
    tables.grow({0: [[6]], 1: [[]]}, {0: 16, 1: 4})
    assert tables.block_tables[0, :2].tolist() == [[0, 1, 4, 6, -1], [2, -1, -1, -1, -1]]


def test_growth_may_fill_the_row_of_a_table():
    tables = loaded(1)
    tables.grow({0: [[4, 6, 8]]}, {0: 20})
    assert tables.block_tables[0, 0].tolist() == [0, 1, 4, 6, 8]


def test_a_limit_may_rise_within_the_pages_that_are_there():
    tables = loaded(1)
    tables.grow({0: [[]]}, {0: 8})
    assert tables.token_limits.tolist() == [8, 4, 0]


def test_growth_leaves_a_raised_overflow_flag_for_whoever_reads_it():
    tables = loaded(1)
    tables.overflow[1] = 1
    tables.grow({1: [[5]]}, {1: 8})
    assert tables.overflow.tolist() == [0, 1, 0]


def test_a_page_that_was_appended_is_no_longer_free():
    tables = loaded(1)
    tables.grow({0: [[4]]}, {0: 12})
    with pytest.raises(BatchError, match="two requests would share a slot"):
        tables.grow({1: [[4]]}, {1: 8})


def test_a_load_forgets_what_was_appended():
    tables = loaded(1)
    tables.grow({0: [[4]]}, {0: 12})
    tables.load([[[1]]], [4])
    tables.grow({0: [[4, 0]]}, {0: 12})
    assert tables.block_tables[0, 0, :3].tolist() == [1, 4, 0]


REFUSED = {
    "a request that is not live": (({2: [[4]]}, {2: 4}), "0 to 1, got [2]"),
    "limits of others": (({0: [[4]]}, {1: 8}), "got [0] and [1]"),
    "too few groups": (({0: []}, {0: 8}), "got [] more"),
    "too many pages": (({0: [[4, 5, 6, 7]]}, {0: 8}), "may have 5 in each, got [4] more"),
    "a limit beyond the pages": (({0: [[4]]}, {0: 13}), "and 12 once it has grown, got a limit of 13"),
    "a lower limit": (({0: [[4]]}, {0: 5}), "may hold 6 tokens"),
    "a page of its own": (({0: [[1]]}, {0: 8}), "and free, got [1]"),
    "another's page": (({0: [[2]]}, {0: 8}), "and free, got [2]"),
    "a page twice": (({0: [[4]], 1: [[4]]}, {0: 8, 1: 8}), "and free, got [4, 4]"),
    "a page that is no int": (({0: [[4.0]]}, {0: 8}), "must be ints, got 4.0"),
    "a limit that is no int": (({0: [[4]]}, {0: 8.5}), "must be ints, got 8.5"),
    "a page outside": (({0: [[12]]}, {0: 8}), "0 to 11 and free, got [12]"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_growth_that_would_let_kernels_stray_is_refused_and_changes_nothing(args, message):
    tables = loaded(1)
    before = contents(tables)
    with pytest.raises(BatchError) as refused:
        tables.grow(*args)
    assert message in str(refused.value)
    assert contents(tables) == before
    tables.grow({0: [[4]]}, {0: 12})
    assert torch.equal(tables.block_tables[0, 0], torch.tensor([0, 1, 4, -1, -1], dtype=torch.int32))
