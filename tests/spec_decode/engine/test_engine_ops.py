"""The ops before and after the target's forward: their schemas, their writes, and the checks before them."""

import pytest
import torch

from builders import BatchError
from spec_decode.engine.input_batch import InputBatch
from spec_decode.engine.kernels.prepare_inputs import prepare_inputs
from spec_decode.engine.kernels.update_requests import UpdateRequests, update_requests
from spec_decode.verification import RejectionSampling, VerifyOutput

INT32 = torch.int32
ROWS, STEPS = 3, 2


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def step_of(drafts, accepted, lens, max_lens, *, drafting=True, position_offset=0):
    """A step whose written tensors hold 7s, with next tokens from 90 on."""
    rows, steps = len(drafts), len(drafts[0])
    draft_inputs = zeros(rows, 1 + steps) + 7, *(zeros(rows, dtype=t) + 7 for t in (INT32, INT32, torch.int64, INT32))
    return UpdateRequests(
        torch.tensor(accepted), torch.arange(rows) + 90,
        torch.cat([zeros(rows, 1) + 5, torch.tensor(drafts).clamp(min=0)], 1), torch.tensor(drafts),
        torch.tensor(lens), torch.tensor(max_lens), zeros(rows) + 7, zeros(rows, 2 + steps) + 7,
        *(draft_inputs if drafting else (None,) * 5), position_offset,
    )  # fmt: skip


THREE = {"drafts": [[1, 2], [3, -1], [4, 5]], "accepted": [2, 0, 1], "lens": [4, 9, 1], "max_lens": [40, 10, 4]}


@pytest.mark.parametrize("name", ["accepted", "next_tokens"])
def test_verify_output_of_other_dtype_is_rejected(name):
    batch = InputBatch(2, torch.device("cpu"), 9, None, RejectionSampling())
    output = {"accepted": zeros(2), "next_tokens": zeros(2) + 90}
    output[name] = output[name].int()
    with pytest.raises(BatchError, match=rf"{name} must be torch\.int64"):
        batch.update_requests(slice(2), zeros(2, 1), zeros(2, 0), VerifyOutput(**output))
    assert not batch.last_tokens.any()


def test_prepare_inputs_starts_with_last_token_and_draft():
    context_lens, token_ids = prepare_inputs(
        torch.tensor([0, 1, 9]), torch.tensor([0, 5, 6]), torch.tensor([[-1, -1], [3, 4], [3, -1]])
    )
    assert context_lens.tolist() == [0, 0, 8] and context_lens.dtype == INT32
    assert token_ids.tolist() == [[0, 0, 0], [5, 3, 4], [6, 3, 0]]


def test_prepare_inputs_without_draft_is_last_token():
    assert prepare_inputs(torch.tensor([4, 1]), torch.tensor([7, 5]), zeros(2, 0))[1].tolist() == [[7], [5]]


def test_lengths_grow_by_accepted_tokens_and_one():
    step = step_of([[1, 2], [3, -1], [4, 5], [-1, -1]], [2, 0, 1, 0], [4, 9, 1, 0], [40, 10, 2, 0])
    update_requests(*step)
    assert step.lens.tolist() == [7, 10, 2, 0] and step.max_lens.tolist() == [40, 10, 2, 0]
    assert step.last_tokens.tolist() == [90, 91, 92, 93]


def test_outputs_are_accepted_tokens_and_next_token():
    step = step_of(**THREE)
    update_requests(*step)
    assert [row[: 2 + row[0]] for row in step.outputs.tolist()] == [[2, 1, 2, 90], [0, 91], [1, 4, 92]]


@pytest.mark.parametrize("position_offset", [0, 1])
def test_draft_inputs_follow_the_step(position_offset):
    step = step_of(**THREE | {"lens": [4, 9, 0], "max_lens": [40, 11, 4]}, position_offset=position_offset)
    update_requests(*step)
    assert step.draft_token_ids.tolist() == step.token_ids.tolist()
    assert step.draft_context_lens.tolist() == [3 + position_offset, 8 + position_offset, 0]
    assert step.draft_accepted.tolist() == [2, 0, 1] and step.draft_next_tokens.tolist() == [90, 91, 92]


def test_last_token_of_request_is_never_drafted():
    step = step_of([[1, 2]] * 5, [0] * 5, [4] * 5, [40, 8, 7, 6, 5])
    update_requests(*step)
    assert step.draft_lens.tolist() == [2, 2, 1, 0, 0]


def test_update_requests_works_without_drafter():
    step = step_of([[1, 2]], [1], [4], [40], drafting=False)
    update_requests(*step)
    assert step.lens.tolist() == [6]
