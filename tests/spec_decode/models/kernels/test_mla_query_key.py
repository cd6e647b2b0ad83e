"""The query and key of latent attention on the CPU: the float64 formula, and what is rejected."""

import pytest
import torch

from attn_backends.kernels.rope import Rope
from builders.errors import BatchError
from spec_decode.models.kernels.mla_query_key import mla_query_key
from tests.attn_backends.kernels.test_head_rotary import angles_of, rotated

TOKENS, HEADS, DIMS, ROTARY = 3, 2, 4, 6


def operands(**changes):
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(9, ROTARY // 2, generator=generator) * 6
    defaults = {
        "absorbed": torch.randn(TOKENS, HEADS, DIMS, generator=generator),
        "rotated": torch.randn(TOKENS, HEADS, ROTARY, generator=generator),
        "latent": torch.randn(TOKENS, DIMS + ROTARY, generator=generator),
        "norm": 1 + torch.randn(DIMS, generator=generator) / 3,
        "eps": 1e-6,
        "rope": Rope(torch.tensor([0, 8, 3]), torch.cat([angles.cos(), angles.sin()], -1)),
    }
    return {**defaults, **changes}


def test_query_and_key_match_rotated_normed_formula():
    inputs = operands()
    query, key = mla_query_key(**inputs)
    factors = angles_of(*inputs["rope"])
    latent, shared = inputs["latent"].double().split([DIMS, ROTARY], 1)
    normed = latent / (latent.square().mean(1, keepdim=True) + 1e-6).sqrt() * inputs["norm"].double()
    wanted = torch.cat([normed[:, None], rotated(shared[:, None], factors)], -1)
    torch.testing.assert_close(key.double(), wanted, rtol=1e-5, atol=1e-6)
    wanted = torch.cat([inputs["absorbed"].double(), rotated(inputs["rotated"].double(), factors)], -1)
    torch.testing.assert_close(query.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.outside_inference_mode
@pytest.mark.parametrize("part", ["absorbed", "rotated", "latent", "norm"])
def test_each_part_gets_a_gradient_alone(part):
    inputs = operands()
    inputs[part].requires_grad_()
    query, key = mla_query_key(**inputs)
    (query.square().sum() + key.sum()).backward()
    assert inputs[part].grad.abs().sum() > 0


MISFITS = {
    "heads": ({"rotated": torch.zeros(TOKENS, HEADS + 1, ROTARY)}, "^rotated must"),
    "the latent's size": ({"latent": torch.zeros(TOKENS, DIMS)}, "^latent must"),
    "the latent's dtype": ({"latent": torch.zeros(TOKENS, DIMS + ROTARY).half()}, "^latent must"),
    "the norm's size": ({"norm": torch.ones(DIMS + 1)}, "^norm must be"),
    "a norm of numbers apart": ({"norm": torch.ones(2 * DIMS)[::2]}, "^norm must be contiguous"),
    "the number of positions": (
        {"rope": Rope(torch.zeros(TOKENS + 1, dtype=torch.int64), torch.zeros(9, ROTARY))},
        "positions must",
    ),
    "parts that are not adjacent": ({"absorbed": torch.zeros(TOKENS, DIMS, HEADS).mT}, "contiguous in their last dim"),
}


@pytest.mark.parametrize(("changes", "message"), MISFITS.values(), ids=MISFITS)
def test_misfit_parts_are_rejected(changes, message):
    with pytest.raises(BatchError, match=message):
        mla_query_key(**operands(**changes))
