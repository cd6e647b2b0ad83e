import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import advance_state, set_decode_state, set_extend_state
from builders.kernels.triton_runtime import torch_implementations
from tests.factories import Shared, shared_states, state_of


def assert_alike(shared: Shared, operation, query_len=1):
    """The operation leaves behind by the kernel what it does by the torch implementation; returns it."""
    by_kernel, by_torch = shared.buffers(query_len), shared.buffers(query_len)
    operation(by_kernel)
    with torch_implementations():
        operation(by_torch)
    assert state_of(by_kernel) == state_of(by_torch)
    return state_of(by_kernel)


def lengths(data, shared, values):
    drawn = data.draw(st.lists(values, min_size=shared.rows, max_size=shared.rows))
    return torch.tensor(drawn, dtype=torch.int32)


@settings(max_examples=30)
@given(shared_states(), st.integers(1, 5), st.data())
def test_every_operation_matches_on_any_state(shared, query_len, data):
    def advance(batch):
        for _ in range(query_len):
            advance_state(batch, shared.num_reqs)

    context = lengths(data, shared, st.integers(0, 30))
    extended = lengths(data, shared, st.one_of(st.just(0), st.integers(query_len, query_len + 20)))
    far = st.sampled_from([-(2**31), 2**31 - 1])
    accepted = lengths(data, shared, st.one_of(st.integers(-2, query_len + 1), far))

    def begin(batch):
        batch.step.fill_(3)
        set_decode_state(batch, extended, accepted, shared.num_reqs, query_len)

    assert_alike(shared, advance)
    assert_alike(shared, lambda batch: set_extend_state(batch, context, shared.num_reqs, query_len), query_len)
    assert_alike(shared, begin)


def test_advance_covers_more_rows_than_one_block():
    rows = 300
    table = [[[-1 if row % 7 == 0 else row % 100, row % 50] for row in range(rows)]]
    shared = Shared([4], table, [(row * 5) % 11 for row in range(rows)], [row % 9 for row in range(rows)], rows - 3)
    assert_alike(shared, lambda batch: advance_state(batch, shared.num_reqs))


def test_set_extend_state_covers_rows_with_own_pages():
    table = [[[4 * row + column for column in range(4)] for row in range(first, first + 4)] for first in (0, 4)]
    shared = Shared([4, 2], table, [8] * 4, [0] * 4, 4)
    lens = torch.tensor([3, 0, 5, 1], dtype=torch.int32)
    assert min(assert_alike(shared, lambda batch: set_extend_state(batch, lens, 4, 3), 3)["seq_lens"]) > 0
