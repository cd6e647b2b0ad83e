"""Whole rounds of drafts with 8-bit weights: the kernels draft what the torch implementations draft."""

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from tests.spec_decode.models.test_quantise import first_logits, make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_reqs"),
    [("eagle-1024", 1), ("eagle-1024", 3), ("qwen3-8b-eagle3", 1), ("glm-4.7-flash-mtp", 3), ("qwen3-8b-dflash", 1)],
)
def test_fp8_round_matches_torch_implementation(name, num_reqs):
    # The interpreter truncates fp32 to bf16 where the hardware rounds.
    draft = make(name, "fp8", torch.float16)
    with torch_implementations():
        wanted = first_logits(draft, num_reqs)
    found, scored = first_logits(draft, num_reqs), wanted.isfinite()
    assert (found - wanted)[scored].abs().max() < 0.002 * wanted[scored].abs().max()
