"""The target's logits, of tokens more than 2^31 elements apart."""

from __future__ import annotations

import pytest
import torch

from spec_decode.sampling.kernels.draw_target import draw_target
from spec_decode.sampling.kernels.process_logits import process_logits
from tests.attn_backends.kernels.test_wide_strides import DEVICES, widened


def processed(logits):
    return process_logits(logits, torch.ones(2, device=logits.device), None, None, None)


def drawn(logits):
    zeros, ones = torch.zeros(2, dtype=torch.int64, device=logits.device), torch.ones(2, device=logits.device)
    restricted = torch.zeros(2, 1, 3, device=logits.device)
    return draw_target(logits, restricted, 0 * ones, zeros.int(), ones, zeros, zeros, None)


each_reader = pytest.mark.parametrize("read", [processed, drawn])


def check_wide_tokens(read, device, folder):
    logits = torch.tensor([[[0, -1, 3.0]], [[1, -1, 2.0]]], device=device)
    assert torch.equal(read(widened(logits, 2, folder)), read(logits))


@pytest.mark.parametrize("device", DEVICES)
@each_reader
def test_tokens_more_than_two_to_the_31_apart_are_found(read, device, tmp_path):
    check_wide_tokens(read, device, tmp_path)
