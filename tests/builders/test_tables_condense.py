"""Rows that stay are what a load of the same requests would make them, and the pages of the others are free again."""

import random
import re

import pytest

from builders import BatchError, RequestTables

SIZES, COUNTS, REQS, LONGEST = [2, 4], [40, 24], 4, 16


def empty_tables():
    return RequestTables(page_sizes=SIZES, num_pages=COUNTS, max_reqs=REQS, max_seq_len=LONGEST, device="cpu")


def contents(tables):
    return (
        tables.block_tables.tolist(),
        tables.token_limits.tolist(),
        tables.overflow.tolist(),
        tables.num_live,
        tables.limits_host,
        tables.longest,
        tables.writable_host,
    )


def loaded(**options):
    """Three requests of 8 tokens: the first two share what the first group's page 0 and the second's page 5 hold."""
    tables = empty_tables()
    pages = [[[9, 1, 2, 3], [9, 4, 6, 7], [8, 10, 11, 12]], [[5, 0], [5, 1], [2, 3]]]
    tables.load(pages, [8, 8, 8], **{"writable_from": [4, 4, 0], **options})
    return tables


def test_tables_that_changed_row_by_row_are_what_a_load_makes_of_the_same_requests():
    rng, tables, free = random.Random(0), empty_tables(), [list(range(count)) for count in COUNTS]
    requests = []  # pages by group, and a limit
    for _ in range(300):
        kept = rng.sample(range(len(requests)), rng.randint(0, len(requests)))
        for row in set(range(len(requests))).difference(kept):
            for group, pages in zip(free, requests[row][0], strict=True):
                group += pages
        requests = [requests[row] for row in kept]
        new = rng.randint(0, REQS - len(kept))
        tables.overflow.fill_(1)
        tables.condense(kept, new)
        requests += [([[], []], 0) for _ in range(new)]
        growth = {}
        for row, (pages, limit) in enumerate(requests):
            limit = rng.randint(max(1, limit), LONGEST)
            more = [max(0, -(-limit // size) - len(own)) for size, own in zip(SIZES, pages, strict=True)]
            growth[row] = [
                [group.pop(rng.randrange(len(group))) for _ in range(count)]
                for group, count in zip(free, more, strict=True)
            ]
            requests[row] = ([own + add for own, add in zip(pages, growth[row], strict=True)], limit)
        tables.grow(growth, {row: limit for row, (_, limit) in enumerate(requests)})
        fresh = empty_tables()
        fresh.load([[pages[group] for pages, _ in requests] for group in range(2)], [limit for _, limit in requests])
        assert contents(tables) == contents(fresh)


def test_a_new_row_is_padding_until_it_grows():
    tables = loaded()
    tables.condense([], 2)
    assert tables.num_live == 2 and tables.limits_host == (0, 0) and tables.longest == 0
    tables.grow({1: [[3, 4], [5]]}, {1: 4})
    assert tables.token_limits.tolist() == [0, 4, 0, 0] and tables.longest == 4
    assert tables.block_tables[:, 1, :2].tolist() == [[3, 4], [5, -1]]


def test_pages_of_a_row_that_went_may_be_anothers():
    tables = loaded()
    tables.condense([0, 1])
    tables.grow({0: [[8], [2]]}, {0: 10})
    assert tables.block_tables[0, 0, :5].tolist() == [9, 1, 2, 3, 8]


@pytest.mark.parametrize("pages", [[[10], []], [[], [2]]], ids=["first group", "second group"])
def test_pages_of_a_row_that_stays_may_not_be_anothers(pages):
    tables = loaded()
    tables.condense([2, 0])
    with pytest.raises(BatchError, match="two requests would share a slot"):
        tables.grow({1: pages}, {1: 8})


@pytest.mark.parametrize("stays", [0, 1])
@pytest.mark.parametrize("pages", [[[9], []], [[], [5]]], ids=["first group", "second group"])
def test_a_shared_prefix_stays_taken_while_one_of_its_requests_does(stays, pages):
    tables = loaded()
    tables.condense([2, stays])
    assert tables.writable_host == (0, 4)
    with pytest.raises(BatchError, match="two requests would share a slot"):
        tables.grow({0: pages}, {0: 8})
    tables.condense([0])
    tables.grow({0: pages}, {0: 8})


def test_nothing_stays_taken_where_no_row_stays():
    tables = loaded()
    tables._taken[0].add(30)  # what a call that was interrupted left
    tables.condense([], 1)
    tables.grow({0: [[30, 9], [5]]}, {0: 4})
    assert tables.limits_host == (4,)


def test_condensing_keeps_every_address():
    tables = loaded()
    tensors = [tables.block_tables, tables.token_limits, tables.overflow, tables.page_sizes]
    before = [tensor.data_ptr() for tensor in tensors]
    tables.condense([2], 1)
    assert [
        t.data_ptr() for t in (tables.block_tables, tables.token_limits, tables.overflow, tables.page_sizes)
    ] == before


REFUSED = {
    "a row twice": (([0, 0],), "different live rows, 0 to 2, got [0, 0]"),
    "a row that is not live": (([0, 3],), "different live rows, 0 to 2, got [0, 3]"),
    "a negative row": (([-1],), "different live rows, 0 to 2, got [-1]"),
    "more rows than there are": (([0, 1], 3), "at most 4 requests fit these tables, got 2 that stay and 3 new ones"),
    "a negative number": (([0, 1], -1), "got 2 that stay and -1 new ones"),
    "a row that is no int": (([True],), "kept_rows and num_new must be ints, got True"),
    "a number that is no int": (([0], 1.0), "kept_rows and num_new must be ints, got 1.0"),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_rows_that_cannot_stay_are_refused_and_nothing_changes(args, message):
    tables = loaded()
    tables.overflow.fill_(1)
    before, taken = contents(tables), [set(pages) for pages in tables._taken]
    with pytest.raises(BatchError, match=re.escape(message)):
        tables.condense(*args)
    assert contents(tables) == before and tables._taken == taken
