"""The ops before and after the target's forward: their schemas, what they refuse and what they write."""

import pytest
import torch

from builders import BatchError
from spec_decode.engine.kernels.prepare_inputs import prepare_inputs
from spec_decode.engine.kernels.update_requests import DraftInputs, RequestTensors, update_requests

INT32 = torch.int32
ROWS, STEPS = 3, 2


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def step_of(drafts, accepted, lens, max_lens):
    """The arguments of update_requests: requests and draft inputs of 7s, next tokens from 90 on."""
    rows, steps = len(drafts), len(drafts[0])
    requests = RequestTensors(torch.tensor(lens), torch.tensor(max_lens), zeros(rows) + 7, zeros(rows, 2 + steps) + 7)
    draft_inputs = DraftInputs(
        zeros(rows, 1 + steps) + 7, *(zeros(rows, dtype=dtype) + 7 for dtype in (INT32, INT32, torch.int64, INT32))
    )
    ids = torch.cat([zeros(rows, 1) + 5, torch.tensor(drafts).clamp(min=0)], 1)
    return torch.tensor(accepted), torch.arange(rows) + 90, ids, torch.tensor(drafts), requests, draft_inputs


STEP = step_of([[1, 2], [3, -1], [4, 5]], [2, 0, 1], [4, 9, 1], [40, 10, 4])
CALLS = {
    "prepare_inputs": (zeros(ROWS), zeros(ROWS), zeros(ROWS, STEPS)),
    "update_requests": (*STEP[:4], *STEP[4], *STEP[5], 1),
    "update_requests without a drafter": (*STEP[:4], *STEP[4], *(None,) * 5, 0),
}


@pytest.mark.parametrize(("name", "arguments"), CALLS.items(), ids=CALLS)
def test_the_schema_is_true(name, arguments):
    op = getattr(torch.ops.spec_decode, name.split()[0]).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_lengths_of_another_dtype_are_refused():
    with pytest.raises(BatchError, match=r"must be torch\..* nothing was run"):
        prepare_inputs(zeros(ROWS, dtype=INT32), zeros(ROWS), zeros(ROWS, STEPS))


@pytest.mark.parametrize("index", range(4))
def test_a_refused_update_writes_nothing(index):
    given = list(step_of([[1, 2]], [1], [4], [40]))
    given[index] = given[index].int()
    with pytest.raises(BatchError, match="nothing was run"):
        update_requests(*given)
    assert given[4].lens.tolist() == [4] and given[5].accepted.tolist() == [7]


def test_draft_inputs_of_another_dtype_are_refused():
    *given, draft_inputs = step_of([[1, 2]], [1], [4], [40])
    with pytest.raises(BatchError, match=r"accepted must be torch\.int32"):
        update_requests(*given, draft_inputs._replace(accepted=zeros(1)))


def test_a_step_begins_with_the_last_token_and_the_draft():
    context_lens, token_ids = prepare_inputs(
        torch.tensor([0, 1, 9]), torch.tensor([0, 5, 6]), torch.tensor([[-1, -1], [3, 4], [3, -1]])
    )
    assert context_lens.tolist() == [0, 0, 8] and context_lens.dtype == INT32
    assert token_ids.tolist() == [[0, 0, 0], [5, 3, 4], [6, 3, 0]]


def test_a_step_without_a_draft_begins_with_the_last_token():
    assert prepare_inputs(torch.tensor([4, 1]), torch.tensor([7, 5]), zeros(2, 0))[1].tolist() == [[7], [5]]


def test_requests_grow_by_what_was_kept_and_one_up_to_their_end():
    given = step_of([[1, 2], [3, -1], [4, 5], [-1, -1]], [2, 0, 1, 0], [4, 9, 1, 0], [40, 10, 2, 0])
    update_requests(*given, position_offset=0)
    requests = given[4]
    assert requests.lens.tolist() == [7, 10, 2, 0] and requests.max_lens.tolist() == [40, 10, 2, 0]
    assert requests.last_tokens.tolist() == [90, 91, 92, 93]


def test_the_output_is_what_was_kept_and_the_targets_own_token_after_it():
    given = step_of([[1, 2], [3, -1], [4, 5]], [2, 0, 1], [4, 9, 1], [40, 10, 4])
    update_requests(*given)
    assert [row[: 2 + row[0]] for row in given[4].outputs.tolist()] == [[2, 1, 2, 90], [0, 91], [1, 4, 92]]


@pytest.mark.parametrize("position_offset", [0, 1])
def test_the_draft_inputs_are_those_of_the_step(position_offset):
    given = step_of([[1, 2], [3, -1], [4, 5]], [2, 0, 1], [4, 9, 0], [40, 11, 4])
    update_requests(*given, position_offset=position_offset)
    draft_inputs = given[5]
    assert draft_inputs.token_ids.tolist() == given[2].tolist()
    assert draft_inputs.context_lens.tolist() == [3 + position_offset, 8 + position_offset, 0]
    assert draft_inputs.accepted.tolist() == [2, 0, 1] and draft_inputs.next_tokens.tolist() == [90, 91, 92]


def test_a_requests_last_token_is_never_drafted():
    given = step_of([[1, 2]] * 5, [0] * 5, [4] * 5, [40, 8, 7, 6, 5])
    update_requests(*given)
    assert given[5].draft_lens.tolist() == [2, 2, 1, 0, 0]


def test_without_a_drafter_only_the_requests_are_updated():
    *given, draft_inputs = step_of([[1, 2]], [1], [4], [40])
    update_requests(*given, None)
    assert given[4].lens.tolist() == [6] and draft_inputs.accepted.tolist() == [7]
