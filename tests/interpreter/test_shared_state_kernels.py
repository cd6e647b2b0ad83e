import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import advance_state, set_decode_state, set_extend_state
from builders.kernels.triton_runtime import torch_implementations
from tests.factories import Shared, shared_states, state_of

FEW = settings(max_examples=30)


def both_ways(shared: Shared, operation, query_len=1):
    """What the operation leaves behind by the kernel, and by the torch implementation."""
    by_kernel, by_torch = shared.buffers(query_len), shared.buffers(query_len)
    operation(by_kernel)
    with torch_implementations():
        operation(by_torch)
    return state_of(by_kernel), state_of(by_torch)


@FEW
@given(shared_states(), st.integers(1, 3))
def test_advance(shared, steps):
    def advance(batch):
        for _ in range(steps):
            advance_state(batch, shared.num_reqs)

    by_kernel, by_torch = both_ways(shared, advance)
    assert by_kernel == by_torch


def test_advance_of_more_rows_than_one_block():
    rows = 300
    table = [[[-1 if row % 7 == 0 else row % 100, row % 50] for row in range(rows)]]
    shared = Shared([4], table, [(row * 5) % 11 for row in range(rows)], [row % 9 for row in range(rows)], rows - 3)
    by_kernel, by_torch = both_ways(shared, lambda batch: advance_state(batch, shared.num_reqs))
    assert by_kernel == by_torch


@FEW
@given(shared_states(), st.integers(1, 5), st.data())
def test_set_extend_state(shared, query_len, data):
    context = data.draw(st.lists(st.integers(0, 30), min_size=shared.rows, max_size=shared.rows))
    lens = torch.tensor(context, dtype=torch.int32)
    by_kernel, by_torch = both_ways(
        shared, lambda batch: set_extend_state(batch, lens, shared.num_reqs, query_len), query_len
    )
    assert by_kernel == by_torch


def test_set_extend_state_of_several_rows_over_pages_of_their_own():
    table = [[[4 * row + column for column in range(4)] for row in range(first, first + 4)] for first in (0, 4)]
    shared = Shared([4, 2], table, [8] * 4, [0] * 4, 4)
    lens = torch.tensor([3, 0, 5, 1], dtype=torch.int32)
    by_kernel, by_torch = both_ways(shared, lambda batch: set_extend_state(batch, lens, 4, 3), 3)
    assert by_kernel == by_torch
    assert min(by_kernel["seq_lens"]) > 0


@FEW
@given(shared_states(), st.integers(1, 5), st.data())
def test_set_decode_state(shared, query_len, data):
    lengths = st.one_of(st.just(0), st.integers(query_len, query_len + 20))
    rows = {"min_size": shared.rows, "max_size": shared.rows}
    extended = torch.tensor(data.draw(st.lists(lengths, **rows)), dtype=torch.int32)
    counts = st.one_of(st.integers(-2, query_len + 1), st.sampled_from([-(2**31), 2**31 - 1]))
    accepted = torch.tensor(data.draw(st.lists(counts, **rows)), dtype=torch.int32)

    def begin(batch):
        batch.step.fill_(3)
        set_decode_state(batch, extended, accepted, shared.num_reqs, query_len)

    by_kernel, by_torch = both_ways(shared, begin)
    assert by_kernel == by_torch
