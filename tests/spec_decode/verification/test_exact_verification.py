"""Every output of a verifier follows from its noise: what fp64 in plain Python makes of the same uniforms and the same
Gumbel noise, for every draft of a tiny vocabulary. No statistics: a biased weight or threshold shows in a few rows."""

import math

import pytest
import torch

from spec_decode.sampling import noise
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.spec_decode.sampling.noise_words import each_device, seeds_of
from tests.spec_decode.verification.verify_oracle import (
    FIRST,
    STEPS,
    Case,
    block_oracle,
    block_passes,
    rejection_oracle,
    rejection_passes,
)

TABLES = 8
KINDS = {
    "rejection": (rejection_sample, rejection_oracle, rejection_passes),
    "block": (block_verify, block_oracle, block_passes),
}
each_kind = pytest.mark.parametrize(("op", "oracle", "passes"), KINDS.values(), ids=KINDS)


@each_device
@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_every_output_is_what_the_noise_says(op, oracle, passes, seed, device):
    case = Case(TABLES)
    case.check(op, oracle, torch.arange(len(case.rows)) * 3 + seed, device, 1e-5)


@each_device
@each_kind
@pytest.mark.parametrize("column", range(STEPS))
@pytest.mark.parametrize("factor", [1 - 1e-4, 1 + 1e-4], ids=["just below", "just above"])
def test_each_prefix_passes_up_to_its_probability_and_no_further(op, oracle, passes, column, factor, device):
    case = Case(TABLES)
    chances = [passes(p, q, draft) for p, q, draft in zip(case.p, case.q, case.drafts, strict=True)]
    wanted = [x[column] * factor if column < len(x) and 0 < x[column] < 0.999 else 0.5 for x in chances]
    seeds = seeds_of(torch.tensor(wanted, dtype=torch.float64), torch.tensor(FIRST + column), noise.ACCEPT)
    case.check(op, oracle, seeds, device, 2e-5)


@each_device
@each_kind
@pytest.mark.parametrize(("factor", "accepted"), [(1 - 1e-4, 1), (1 + 1e-4, 0)], ids=["just below", "just above"])
@pytest.mark.parametrize("p", [1e-3, 1e-9, 1e-15])
def test_a_token_is_accepted_with_a_tiny_probability(op, oracle, passes, p, factor, accepted, device):
    seeds = seeds_of(torch.tensor([p * factor], dtype=torch.float64), torch.tensor([FIRST]), noise.ACCEPT)
    row = torch.tensor([math.log(p), math.log1p(-p)])
    arguments = VerifyArguments(
        row.expand(1, 2, -1).contiguous(), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[[0.0, -80.0]]]),
        torch.ones(1), seeds, seeds, torch.tensor([FIRST]),
    )  # fmt: skip
    assert op(*(x.to(device) for x in arguments))[0].tolist() == [accepted]


@each_device
@pytest.mark.parametrize("fraction", [0.25, 1e-9, 1e-15])
def test_synthetic_acceptance_of_a_tiny_mean(fraction, device):
    wanted = torch.tensor([fraction * (1 - 1e-4), fraction * (1 + 1e-4)], dtype=torch.float64)
    first = torch.full((2,), FIRST)
    seeds = seeds_of(wanted, first, noise.ACCEPT)
    drafts = torch.zeros(2, STEPS, dtype=torch.int64)
    assert synthetic_accept(*(x.to(device) for x in (drafts, seeds, first)), fraction)[0].tolist() == [1, 0]
