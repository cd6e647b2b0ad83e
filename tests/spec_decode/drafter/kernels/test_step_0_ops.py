"""The ops of step 0, which read the verified tokens and pass inputs on, compared with the rules in plain Python."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_decode.drafter.kernels.gather_accepted import GatherAccepted, gather_accepted
from spec_decode.drafter.kernels.shift_tokens import shift_tokens

WILD = st.one_of(st.integers(-3, 8), st.sampled_from([-(2**31), 2**31 - 1]))


def nearest(count, query_len):
    return min(max(count, 0), query_len - 1)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_shift_tokens_moves_up_to_last_accepted(query_len, rows, data):
    each = {"min_size": rows + 1, "max_size": rows + 1}
    accepted, following = (data.draw(st.lists(s, **each)) for s in (WILD, st.integers(100, 199)))
    ids = [[10 * row + place for place in range(query_len)] for row in range(rows)]
    expected = [
        ids[row][place + 1] if place < nearest(accepted[row], query_len) else following[row]
        for row in range(rows)
        for place in range(query_len)
    ]
    assert shift_tokens(torch.tensor(ids), torch.tensor(following), int32(accepted)).tolist() == expected


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_gather_accepted_takes_last_accepted_state(query_len, rows, data):
    accepted = data.draw(st.lists(WILD, min_size=rows + 1, max_size=rows + 1))
    hidden = torch.arange(rows * query_len * 3).view(-1, 3).float()
    kept = torch.full((rows, 3), -1.0)
    gather_accepted(*GatherAccepted(hidden, int32(accepted), out=kept, query_len=query_len))
    rows_kept = [row * query_len + nearest(accepted[row], query_len) for row in range(rows)]
    assert kept.tolist() == [[3.0 * at, 3.0 * at + 1, 3.0 * at + 2] for at in rows_kept]


def test_gathered_state_has_dtype_of_its_buffer():
    kept = torch.zeros(1, 2, dtype=torch.bfloat16)
    hidden = torch.tensor([[0.5, 1.0], [2.0, 1.005]])
    gather_accepted(*GatherAccepted(hidden, int32([1]), out=kept, query_len=2))
    assert torch.equal(kept, torch.tensor([[2.0, 1.005]]).bfloat16())
