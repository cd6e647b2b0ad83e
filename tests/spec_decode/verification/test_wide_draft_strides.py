"""Draft logits whose strides fit in 32 bits and whose elements do not lie within 2^31 of each other."""

from __future__ import annotations

import pytest
import torch

from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.attn_backends.kernels.test_wide_strides import DEVICES, widened

OPS = {"rejection": rejection_sample, "block": block_verify}
ROWS = 64


def arguments_of(dim, device):
    """Drafts of the last token, which is all but certain under q, along a dim of columns in late ones alone, and one of
    many under p."""
    drafts, vocab = (3, 20) if dim == 1 else (2, 3)
    p, q = torch.zeros(ROWS, drafts + 1, vocab), torch.zeros(ROWS, drafts, vocab)
    q[:, 2 if dim == 1 else 0 :, -1] = 20
    tokens, numbers = torch.full((ROWS, drafts), vocab - 1), torch.arange(ROWS)
    arguments = VerifyArguments(p, tokens, q, torch.ones(ROWS), numbers, 50 + numbers, 10 * numbers)
    return VerifyArguments(*(tensor.to(device) for tensor in arguments))


def check_wide_drafts(op, dim, device, folder):
    arguments = arguments_of(dim, device)
    wide = arguments._replace(draft_logits=widened(arguments.draft_logits, dim, folder))
    for found, wanted in zip(OPS[op](*wide.checked()), OPS[op](*arguments.checked()), strict=True):
        assert torch.equal(found, wanted)


each_op_and_dim = pytest.mark.parametrize(("op", "dim"), [(op, dim) for op in OPS for dim in (1, 2)])
"""On CUDA a case takes up to 18 GB; the dim of so many rows would take 280."""


@pytest.mark.parametrize("device", DEVICES)
@each_op_and_dim
def test_draft_logits_more_than_two_to_the_31_apart_are_found(op, dim, device, tmp_path):
    check_wide_drafts(op, dim, device, tmp_path)
