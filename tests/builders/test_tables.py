"""The tables after a load, a growth or a condensation, and that a rejected one changes nothing."""

import random
import re

import pytest
import torch

from builders import BatchError, RequestTables
from tests.factories import make_tables


def empty_tables(page_sizes=(4,), num_pages=(12,), max_reqs=3, max_seq_len=20, device="cpu"):
    return RequestTables(
        page_sizes=page_sizes, num_pages=num_pages, max_reqs=max_reqs, max_seq_len=max_seq_len, device=device
    )


def loaded(groups=1):
    """Two requests, of 6 and 4 tokens, whose flags are up."""
    tables = empty_tables([4] * groups, [12] * groups)
    tables.load([[[0, 1], [2]]] * groups, [6, 4])
    tables.overflow.fill_(1)
    return tables


def sharing():
    """Three requests of 8 tokens: the first two share what the first group's page 9 and the second's page 5 hold."""
    tables = empty_tables([2, 4], [40, 24], 4, 16)
    pages = [[[9, 1, 2, 3], [9, 4, 6, 7], [8, 10, 11, 12]], [[5, 0], [5, 1], [2, 3]]]
    tables.load(pages, [8, 8, 8], writable_from=[4, 4, 0])
    return tables


def tensors_of(tables):
    return tables.block_tables, tables.token_limits, tables.overflow, tables.page_sizes


def contents(tables):
    host = tables.num_live, tables.limits_host, tables.longest, tables.writable_host, tables._allocated
    return ([tensor.tolist() for tensor in tensors_of(tables)], *host)


def test_load_clears_previous_contents():
    tables, fresh = loaded(), empty_tables()
    assert fresh.num_live == 0
    for each in (tables, fresh):
        each.load([[[5, 6]]], [7])
    assert contents(tables) == contents(fresh)
    assert tables.block_tables[0].tolist() == [[5, 6, -1, -1, -1], [-1] * 5, [-1] * 5]
    assert tables.token_limits.tolist() == [7, 0, 0] and tables.overflow.tolist() == [0, 0, 0]
    assert (tables.num_live, tables.limits_host, tables.longest) == (1, (7,), 7)
    assert {tensor.dtype for tensor in tensors_of(tables)} == {torch.int32}


def test_each_group_has_its_own_pages():
    tables = make_tables([10, 10], page_sizes=(4, 8), max_seq_len=16)
    assert (tables.block_tables[0, 0] >= 0).sum() == 4 and (tables.block_tables[1, 0] >= 0).sum() == 2


def test_a_read_only_prefix_may_be_shared():
    tables = empty_tables()
    tables.load([[[0, 1, 2], [0, 1, 3]]], [12, 12], writable_from=[8, 9])
    assert tables.block_tables[0, :2, :3].tolist() == [[0, 1, 2], [0, 1, 3]]


def test_grow_appends_pages_and_keeps_overflow_flags():
    tables = loaded(groups=2)
    tables.grow({1: [[7, 5], [3, 9]]}, {1: 11})
    assert tables.block_tables[0].tolist() == [[0, 1, -1, -1, -1], [2, 7, 5, -1, -1], [-1] * 5]
    assert tables.block_tables[1, 1].tolist() == [2, 3, 9, -1, -1]
    assert tables.token_limits.tolist() == [6, 11, 0] and tables.overflow.tolist() == [1, 1, 1]
    assert (tables.limits_host, tables.longest) == ((6, 11), 11)


@pytest.mark.parametrize("request_", [True, 1.0, "1", None])
def test_grow_rejects_request_that_is_no_int(request_):
    tables = loaded(groups=2)
    before = contents(tables)
    with pytest.raises(BatchError, match="requests must be ints, got"):
        tables.grow({request_: [[7, 5], [3, 9]]}, {request_: 11})
    assert contents(tables) == before


def test_request_grows_until_its_row_is_full():
    tables = loaded()
    tables.grow({0: [[]]}, {0: 8})
    tables.grow({0: [[4]]}, {0: 12})
    tables.grow({0: [[6, 8]], 1: [[]]}, {0: 20, 1: 4})
    assert tables.block_tables[0, :2].tolist() == [[0, 1, 4, 6, 8], [2, -1, -1, -1, -1]]


def test_load_forgets_appended_pages():
    tables = loaded()
    tables.grow({0: [[4]]}, {0: 12})
    tables.load([[[1]]], [4])
    tables.grow({0: [[4, 0]]}, {0: 12})
    assert tables.block_tables[0, 0, :3].tolist() == [1, 4, 0]


def test_changed_tables_equal_freshly_loaded_ones():
    sizes, counts, rows, longest = [2, 4], [40, 24], 4, 16
    rng, tables, free = random.Random(0), empty_tables(sizes, counts, rows, longest), [[*range(n)] for n in counts]
    requests = []  # pages by group, and a limit
    for _ in range(300):
        kept = rng.sample(range(len(requests)), rng.randint(0, len(requests)))
        for row in set(range(len(requests))).difference(kept):
            for group, pages in zip(free, requests[row][0], strict=True):
                group += pages
        requests = [requests[row] for row in kept]
        new = rng.randint(0, rows - len(kept))
        tables.overflow.fill_(1)
        tables.condense(kept, new)
        requests += [([[], []], 0) for _ in range(new)]
        growth = {}
        for row, (pages, limit) in enumerate(requests):
            limit = rng.randint(max(1, limit), longest)
            more = [max(0, -(-limit // size) - len(own)) for size, own in zip(sizes, pages, strict=True)]
            growth[row] = [
                [group.pop(rng.randrange(len(group))) for _ in range(count)]
                for group, count in zip(free, more, strict=True)
            ]
            requests[row] = ([own + add for own, add in zip(pages, growth[row], strict=True)], limit)
        tables.grow(growth, {row: limit for row, (_, limit) in enumerate(requests)})
        fresh = empty_tables(sizes, counts, rows, longest)
        fresh.load([[pages[group] for pages, _ in requests] for group in range(2)], [limit for _, limit in requests])
        assert contents(tables) == contents(fresh)


def test_new_row_is_padding_until_it_grows():
    tables = sharing()
    tables.condense([], 2)
    assert tables.num_live == 2 and tables.limits_host == (0, 0) and tables.longest == 0
    tables.grow({1: [[3, 4], [5]]}, {1: 4})
    assert tables.token_limits.tolist() == [0, 4, 0, 0] and tables.longest == 4
    assert tables.block_tables[:, 1, :2].tolist() == [[3, 4], [5, -1]]


@pytest.mark.parametrize("stays", [0, 1])
@pytest.mark.parametrize("pages", [[[9], []], [[], [5]]], ids=["first group", "second group"])
def test_shared_prefix_is_protected_while_in_use(stays, pages):
    tables = sharing()
    tables.condense([2, stays])
    assert tables.writable_host == (0, 4)
    with pytest.raises(BatchError, match="two requests would share a slot"):
        tables.grow({0: pages}, {0: 8})
    tables.condense([0])
    tables.grow({0: pages}, {0: 8})


def test_condensing_to_no_rows_frees_all_pages():
    tables = sharing()
    tables._allocated[0].add(30)  # what a call that was interrupted left
    tables.condense([], 1)
    tables.grow({0: [[30, 9], [5]]}, {0: 4})
    assert tables.limits_host == (4,)


CHANGES = {
    "load": lambda tables: tables.load([[[0]]], [4]),
    "grow": lambda tables: tables.grow({1: [[7]]}, {1: 8}),
    "condense": lambda tables: tables.condense([1], 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_table_changes_keep_every_address(change):
    tables = loaded()
    before = [tensor.data_ptr() for tensor in tensors_of(tables)]
    change(tables)
    assert [tensor.data_ptr() for tensor in tensors_of(tables)] == before


def load(pages, limits, writable_from=None):
    """A load of one group with these pages of each request."""
    return lambda tables: tables.load([pages], limits, writable_from=writable_from)


def grow(pages, limits):
    return lambda tables: tables.grow(pages, limits)


def condense(*args):
    return lambda tables: tables.condense(*args)


REFUSED = [
    (load([[0], [1], [3], [4]], [4] * 4), "at most 3 requests fit these tables, got 4"),
    (lambda tables: tables.load([], [4]), "pages must hold 1 groups of 1 rows"),
    (load([[0]], [4, 4]), "pages must hold 1 groups of 2 rows, got [1] rows"),
    (load([[0], [1]], [4, 4], [0]), "and 1 writable_from"),
    (load([[0, 1]], [9]), "takes 3 pages of 4 in group 0, but has 2"),
    (load([[0, 1, 2, 3, 4]], [21]), "must hold 1 to 20 tokens in at most 5 pages, got 21"),
    (load([[0]], [0]), "must hold 1 to 20 tokens"),
    (load([[0, 1, 2, 3, 4, 5]], [20]), "got 20 tokens in 6 pages"),
    (load([[0, 12]], [8]), "must be 0 to 11, request 0 lists 12"),
    (load([[-1]], [4]), "must be 0 to 11, request 0 lists -1"),
    (load([[3, 3]], [8]), "must list each page of group 0 once, got [3, 3]"),
    (load([[0, 1], [2, 1]], [8, 8]), "page 1 of group 0 is writable by requests 0 and 1"),
    (load([[0, 1, 2], [0, 1, 3]], [12, 12], [7, 7]), "writable by requests 0 and 1"),
    (load([[0, 1, 2], [0, 4, 3]], [12, 12], [0, 8]), "read by request 1 and writable by request 0"),
    (load([[0, 1, 2], [0, 4, 3]], [12, 12], [8, 0]), "read by request 0 and writable by request 1"),
    (load([[0, 1], [0, 2]], [8, 8], [-4, -4]), "must be positions, 0 to the request's"),
    (load([[0, 1]], [8], [9]), "to the request's token limit, got [9] for limits [8]"),
    # What a tensor of ints would round.
    (load([[0.5]], [4]), "page ids of group 0 must be ints, got 0.5"),
    (load([["0"]], [4]), "page ids of group 0 must be ints, got '0'"),
    (load([[True]], [4]), "page ids of group 0 must be ints, got True"),
    (load([[0]], [2.5]), "token limits and writable_from must be ints, got 2.5"),
    (load([[0]], [True]), "token limits and writable_from must be ints, got True"),
    (load([[0]], [4], [1.0]), "must be ints, got 1.0"),
    (grow({2: [[4]]}, {2: 4}), "0 to 1, got [2]"),
    (grow({0: [[4]]}, {1: 8}), "got [0] and [1]"),
    (grow({0: []}, {0: 8}), "got [] more"),
    (grow({0: [[4, 5, 6, 7]]}, {0: 8}), "can have 5 in each, got [4] more"),
    (grow({0: [[4]]}, {0: 13}), "and 12 once grown, got a limit of 13"),
    (grow({0: [[4]]}, {0: 5}), "can hold 6 tokens"),
    (grow({0: [[1]]}, {0: 8}), "and free, got [1]"),
    (grow({0: [[2]]}, {0: 8}), "and free, got [2]"),
    (grow({0: [[4]], 1: [[4]]}, {0: 8, 1: 8}), "and free, got [4, 4]"),
    (grow({0: [[12]]}, {0: 8}), "0 to 11 and free, got [12]"),
    (grow({0: [[4.0]]}, {0: 8}), "must be ints, got 4.0"),
    (grow({0: [[4]]}, {0: 8.5}), "must be ints, got 8.5"),
    (condense([0, 0]), "distinct live rows, 0 to 1, got [0, 0]"),
    (condense([0, 2]), "distinct live rows, 0 to 1, got [0, 2]"),
    (condense([-1]), "distinct live rows, 0 to 1, got [-1]"),
    (condense([0, 1], 2), "at most 3 requests fit these tables, got 2 kept and 2 new ones"),
    (condense([0, 1], -1), "got 2 kept and -1 new ones"),
    (condense([True]), "kept_rows and num_new must be ints, got True"),
    (condense([0], 1.0), "kept_rows and num_new must be ints, got 1.0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_change_is_rejected_unchanged(change, message):
    tables, before = loaded(), contents(loaded())
    with pytest.raises(BatchError, match=re.escape(message)):
        change(tables)
    assert contents(tables) == before
    tables.grow({0: [[4]]}, {0: 12})
    assert tables.block_tables[0, 0].tolist() == [0, 1, 4, -1, -1]


def test_group_with_too_few_rows_is_rejected():
    with pytest.raises(BatchError, match=re.escape("pages must hold 2 groups of 1 rows, got [1, 0] rows")):
        empty_tables([4, 4], [8, 8]).load([[[0]], []], [4])


NO_SIZE, TOO_LARGE = "must be (1 or more|ints)", "must hold fewer than 2147483648 tokens, got"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_reqs": True}, NO_SIZE),
        ({"max_reqs": -1}, NO_SIZE),
        ({"max_reqs": 1.5}, NO_SIZE),
        ({"page_sizes": [0]}, NO_SIZE),
        ({"num_pages": [-1]}, NO_SIZE),
        ({"max_seq_len": 0}, NO_SIZE),
        ({"page_sizes": [1 << 16], "num_pages": [1 << 15]}, TOO_LARGE),
        ({"max_seq_len": 1 << 31, "page_sizes": [1 << 30], "num_pages": [1]}, TOO_LARGE),
        ({"page_sizes": [4, 8]}, "got 2 sizes and 1 counts"),
    ],
)
def test_invalid_sizes_are_rejected_before_allocation(sizes, message):
    with pytest.raises(BatchError, match=message):
        empty_tables(**sizes)


def test_tables_ignore_default_device():
    with torch.device("meta"):
        tables = empty_tables(device=torch.device("cpu"))
        tables.load([[[2]]], [4])
        tables.grow({0: [[1]]}, {0: 8})
        tables.condense([0])
    assert tables.block_tables[0, 0, :2].tolist() == [2, 1] and tables.token_limits.tolist() == [8, 0, 0]
