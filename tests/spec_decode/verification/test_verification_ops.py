"""Ops of verification and of the target's sampling: their schemas, and the tensors that verifiers refuse."""

import pytest
import torch

from builders import BatchError
from spec_decode.verification import BlockVerification, SyntheticAcceptance
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.spec_decode.verification.verify_helpers import sampling_of

OPS, INT32 = torch.ops.spec_decode, torch.int32
ROWS, STEPS, VOCAB = 3, 2, 7


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def verify_arguments(**changed):
    fields = {
        "processed": torch.randn(ROWS, STEPS + 1, VOCAB), "draft_tokens": zeros(ROWS, STEPS),
        "draft_logits": torch.randn(ROWS, STEPS, VOCAB), "temperature": torch.ones(ROWS), "seeds": zeros(ROWS),
        "accept_seeds": zeros(ROWS), "draft_positions": zeros(ROWS),
    }  # fmt: skip
    return VerifyArguments(**fields | changed)


WRONG = {
    "processed": torch.zeros(ROWS, STEPS, VOCAB),
    "draft_tokens": zeros(ROWS, STEPS, dtype=INT32),
    "draft_logits": torch.zeros(ROWS, STEPS, VOCAB, dtype=torch.bfloat16),
    "temperature": torch.ones(ROWS + 1),
    "seeds": torch.zeros(ROWS),
    "accept_seeds": zeros(1),
    "draft_positions": zeros(ROWS, 1),
}


@pytest.mark.parametrize(("name", "tensor"), WRONG.items(), ids=WRONG)
def test_arguments_of_wrong_tensors_are_refused_by_name(name, tensor):
    with pytest.raises(BatchError, match=f"^{name} must be "):
        verify_arguments(**{name: tensor}).checked()


def test_drafts_of_no_columns_are_refused():
    empty = {"processed": torch.zeros(ROWS, 1, VOCAB), "draft_logits": torch.zeros(ROWS, 0, VOCAB)}
    with pytest.raises(BatchError, match=r"draft_tokens must have a column or more.*Draw .* with sample_target"):
        verify_arguments(draft_tokens=zeros(ROWS, 0), **empty).checked()


def test_arguments_become_contiguous_but_for_the_drafts_logits_which_stay_where_they_are():
    wide = torch.zeros(ROWS, 2 * STEPS, 2 * VOCAB)[:, :STEPS, ::2]
    seeds, tokens = zeros(2 * ROWS)[::2], zeros(ROWS, 2 * STEPS)[:, ::2]
    checked = verify_arguments(draft_logits=wide, draft_tokens=tokens, seeds=seeds, accept_seeds=seeds).checked()
    assert checked.draft_logits is wide
    assert all(tensor.is_contiguous() for tensor in checked if tensor is not wide)


def test_logits_on_another_device_are_refused():
    with pytest.raises(BatchError, match=r"draft_logits must be .* on cpu, got .* on meta"):
        verify_arguments(draft_logits=torch.zeros(ROWS, STEPS, VOCAB, device="meta")).checked()


REFUSED = {
    "synthetic acceptance with one seed for all": lambda: SyntheticAcceptance(1.0).verify(
        torch.zeros(ROWS, STEPS + 1, VOCAB), zeros(ROWS, STEPS), torch.zeros(ROWS, STEPS, VOCAB),
        sampling=sampling_of(ROWS, seeds=zeros(1)), draft_positions=zeros(ROWS),
    ),
    "draft seeds at positions of int32": lambda: BlockVerification().draft_seeds(zeros(ROWS), zeros(ROWS, dtype=INT32)),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_wrong_tensors_are_refused(call):
    with pytest.raises(BatchError, match=r"must be torch\."):
        call()
