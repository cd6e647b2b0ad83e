import pytest
import torch

from builders import BatchError
from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.verification import move_accepted_kv

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


MOVES = {
    "over the end of a page": ([[10, 11, 12, 13, 14, 3]], [[2, 4, 5]]),
    "to where a later one came from": ([[0, 1, 2, 3, 4, 5]], [[3, 4, 5]]),
    "along the first tokens": ([[7, 8, 9, 10]], [[1, 2, 3]]),
    "paths that end": ([[0, 1, 2, 3], [8, 9, 10, 11]], [[-1, -1], [3, -1]]),
    **{
        f"token {token} at slot {outside}": ([[outside if at == token else at for at in range(4)]], [[2, 3]])
        for token in (1, 2)
        for outside in (-1, PAGES * PAGE_SIZE)
    },
}


@pytest.mark.parametrize(("own", "paths"), MOVES.values(), ids=MOVES)
def test_accepted_tokens_move_to_slots_of_plain_text(own, paths):
    """One without a key to move, or a place to go, stays."""
    after = tuple(cache.clone() for cache in caches())
    move_accepted_kv(*after, slots(*own), torch.tensor(paths))
    for before, found in zip(caches(), after, strict=True):
        expected = before.clone()
        for row, path in zip(own, paths, strict=True):
            for place, token in enumerate(path, 1):
                if token > 0 and {row[place], row[token]} <= {*range(PAGES * PAGE_SIZE)}:
                    at(expected, row[place]).copy_(at(before, row[token]))
        assert torch.equal(found, expected)


def test_graph_moves_by_path_of_each_replay():
    key, value = (cache.clone() for cache in caches())
    own, path = slots([0, 1, 2, 3]), torch.tensor([[1, 2]])
    graph = EmulatedRuntime().capture(lambda: move_accepted_kv(key, value, own, path))
    path.copy_(torch.tensor([[3, -1]]))
    graph.replay()
    assert torch.equal(at(key, 1), at(caches()[0], 3)) and torch.equal(at(key, 2), at(caches()[0], 2))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("value_cache must be", lambda k, v, s, p: (k, v[1:], s, p)),
        ("path must be", lambda k, v, s, p: (k, v, s, p.int())),
        ("slot_mapping must be", lambda k, v, s, p: (k, v, s[:0], p)),
        (
            "path must have fewer columns than its tree has query tokens, 2, got 2",
            lambda k, v, s, p: (k, v, s[:, :2], p),
        ),
    ],
)
def test_misfit_tensors_move_nothing(message, change):
    key, value = (cache.clone() for cache in caches())
    with pytest.raises(BatchError, match=message):
        move_accepted_kv(*change(key, value, slots([0, 1, 2]), torch.tensor([[2, -1]])))
    assert torch.equal(key, caches()[0])
