"""Ops of verification and of the sampling around it: their schemas and what they refuse."""

import pytest
import torch

from builders import BatchError
from spec_decode.sampling.kernels.draw_tokens import draw_tokens
from spec_decode.sampling.kernels.process_logits import process_logits
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.hash_seeds import hash_seeds
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept
from spec_decode.verification.kernels.verify_arguments import VerifyArguments

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


CALLS = {
    "process_logits": (torch.randn(ROWS, STEPS, VOCAB), torch.ones(ROWS), None),
    "process_logits of a column": (torch.randn(ROWS, STEPS, VOCAB), torch.ones(ROWS), zeros(ROWS)),
    "draw_tokens": (torch.randn(ROWS, VOCAB), torch.ones(ROWS), zeros(ROWS), zeros(ROWS)),
    "rejection_sample": verify_arguments().checked(),
    "block_verify": verify_arguments().checked(),
    "synthetic_accept": (zeros(ROWS, STEPS), zeros(ROWS), zeros(ROWS), 1.5),
    "hash_seeds": (zeros(ROWS), zeros(ROWS)),
}


@pytest.mark.parametrize(("name", "arguments"), CALLS.items(), ids=CALLS)
def test_the_schema_is_true(name, arguments):
    op = getattr(OPS, name.split()[0]).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


WRONG = {
    "processed": torch.zeros(ROWS, STEPS, VOCAB),
    "draft_tokens": zeros(ROWS, STEPS, dtype=INT32),
    "draft_logits": torch.zeros(ROWS, STEPS, VOCAB, dtype=torch.bfloat16),
    "temperature": torch.ones(ROWS + 1),
    "seeds": torch.zeros(ROWS),
    "accept_seeds": zeros(1),
    "draft_positions": zeros(ROWS, 1),
}


@pytest.mark.parametrize("op", [rejection_sample, block_verify])
@pytest.mark.parametrize(("name", "tensor"), WRONG.items(), ids=WRONG)
def test_arguments_of_wrong_tensors_are_refused_by_name(op, name, tensor):
    with pytest.raises(BatchError, match=f"^{name} must be "):
        op(verify_arguments(**{name: tensor}))


def test_logits_on_another_device_are_refused():
    with pytest.raises(BatchError, match=r"draft_logits must be .* on cpu, got .* on meta"):
        rejection_sample(verify_arguments(draft_logits=torch.zeros(ROWS, STEPS, VOCAB, device="meta")))


REFUSED = {
    "flat logits": lambda: process_logits(torch.zeros(ROWS, VOCAB), torch.ones(ROWS)),
    "temperatures of fewer rows": lambda: process_logits(torch.zeros(ROWS, 1, VOCAB), torch.ones(1)),
    "a column of int32": lambda: process_logits(
        torch.zeros(ROWS, 1, VOCAB), torch.ones(ROWS), zeros(ROWS, dtype=INT32)
    ),
    "a draw from bfloat16": lambda: draw_tokens(
        torch.zeros(ROWS, VOCAB).bfloat16(), temperature=torch.ones(ROWS), seeds=zeros(ROWS), positions=zeros(ROWS)
    ),
    "a draw at no position": lambda: draw_tokens(
        torch.zeros(ROWS, VOCAB), temperature=torch.ones(ROWS), seeds=zeros(ROWS), positions=zeros(0)
    ),
    "one seed for all": lambda: synthetic_accept(
        zeros(ROWS, STEPS), seeds=zeros(1), draft_positions=zeros(ROWS), mean=1.0
    ),
    "positions of int32": lambda: hash_seeds(zeros(ROWS), zeros(ROWS, dtype=INT32)),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_wrong_tensors_are_refused(call):
    with pytest.raises(BatchError, match=r"must be torch\..* nothing was run"):
        call()


def test_only_the_column_asked_for_is_processed():
    logits = torch.arange(12.0).view(2, 3, 2)
    assert process_logits(logits, torch.tensor([2.0, 0.0]), torch.tensor([2, 0])).tolist() == [[[2, 2.5]], [[6, 7]]]


def test_processed_logits_are_a_tensor_of_their_own():
    logits = torch.zeros(1, 1, VOCAB)
    process_logits(logits, torch.zeros(1)).fill_(1)
    assert not logits.any()
