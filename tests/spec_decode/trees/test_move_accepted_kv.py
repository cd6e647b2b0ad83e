import pytest
import torch

from builders import BatchError
from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.trees import move_accepted_kv

PAGES, PAGE_SIZE, HEADS, DIM, VALUE_DIM = 6, 4, 2, 3, 5


def caches():
    """A head-major cache: no stride of it is what a contiguous one has."""
    numbers = torch.arange(PAGES * HEADS * PAGE_SIZE * (DIM + VALUE_DIM), dtype=torch.float32)
    both = numbers.view(PAGES, HEADS, PAGE_SIZE, DIM + VALUE_DIM).transpose(1, 2)
    return both[..., :DIM], both[..., DIM:]


def slots(*rows):
    return torch.tensor(rows)


def at(cache, slot):
    return cache[slot // PAGE_SIZE, slot % PAGE_SIZE]


def moved(slot_mapping, path):
    """Each cache before and after."""
    before, after = caches(), tuple(cache.clone() for cache in caches())
    move_accepted_kv(*after, slot_mapping, torch.tensor(path))
    return list(zip(before, after, strict=True))


def test_accepted_tokens_move_to_the_slots_of_a_plain_text():
    own = [10, 11, 12, 13, 14, 3]  # over the end of a page
    for before, after in moved(slots(own), [[2, 4, 5]]):
        expected = before.clone()
        for place, token in enumerate([2, 4, 5], 1):
            at(expected, own[place]).copy_(at(before, own[token]))
        assert torch.equal(after, expected)


def test_a_token_that_goes_where_a_later_one_came_from_is_moved_first():
    # Query token 3 goes to 1, and 4 to 2, 5 to 3: what lies at 3 has gone before.
    for before, after in moved(slots([0, 1, 2, 3, 4, 5]), [[3, 4, 5]]):
        assert [torch.equal(at(after, i), at(before, j)) for i, j in ((1, 3), (2, 4), (3, 5))] == [True] * 3


def test_a_path_along_the_first_tokens_stays_where_it_is():
    for before, after in moved(slots([7, 8, 9, 10]), [[1, 2, 3]]):
        assert torch.equal(before, after)


def test_nothing_after_a_paths_end_is_moved():
    for before, after in moved(slots([0, 1, 2, 3], [8, 9, 10, 11]), [[-1, -1], [3, -1]]):
        expected = before.clone()
        at(expected, 9).copy_(at(before, 11))
        assert torch.equal(after, expected)


@pytest.mark.parametrize("outside", [-1, PAGES * PAGE_SIZE])
@pytest.mark.parametrize("token", [1, 2])
def test_a_slot_outside_the_cache_is_neither_read_nor_written(outside, token):
    own = [0, 1, 2, 3]
    own[token] = outside
    for before, after in moved(slots(own), [[2, 3]]):
        expected = before.clone()
        if token == 2:  # token 2 has no key to move, and token 3 no place to go
            assert torch.equal(after, before)
        else:
            at(expected, own[2]).copy_(at(before, own[3]))
            assert torch.equal(after, expected)


def test_a_graph_moves_by_the_path_of_each_replay():
    key, value = (cache.clone() for cache in caches())
    own, path = slots([0, 1, 2, 3]), torch.tensor([[1, 2]])
    graph = EmulatedRuntime().capture(lambda: move_accepted_kv(key, value, own, path))
    path.copy_(torch.tensor([[3, -1]]))
    graph.replay()
    assert torch.equal(at(key, 1), at(caches()[0], 3)) and torch.equal(at(key, 2), at(caches()[0], 2))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("value_cache", lambda k, v, s, p: (k, v[1:], s, p)),
        ("path", lambda k, v, s, p: (k, v, s, p.int())),
        ("slot_mapping", lambda k, v, s, p: (k, v, s[:0], p)),
        ("a path", lambda k, v, s, p: (k, v, s[:, :2], p)),
    ],
)
def test_tensors_of_another_kind_are_refused_and_nothing_moves(name, change):
    key, value = (cache.clone() for cache in caches())
    with pytest.raises(BatchError, match=f"{name} must be"):
        move_accepted_kv(*change(key, value, slots([0, 1, 2]), torch.tensor([[2, -1]])))
    assert torch.equal(key, caches()[0])
