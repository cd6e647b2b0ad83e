"""Every output of a verifier follows from its noise: what fp64 in plain Python makes of the same uniforms and the same
Gumbel noise, for every draft of a tiny vocabulary. No statistics: a biased weight or threshold shows in a few rows."""

import math

import pytest
import torch

from spec_decode.sampling import noise
from spec_decode.verification import verifier
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.hash_seeds import hash_seeds
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.spec_decode.sampling.noise_words import each_device, seeds_of
from tests.spec_decode.verification.verify_helpers import sampling_of
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


@each_device
@each_kind
def test_where_the_residual_is_empty_the_targets_own_token_follows(op, oracle, passes, device):
    # Neither model can produce token 0, which is rejected, and p is q: max(p - q, 0) holds nothing.
    rows, vocab = 64, 5
    row = torch.arange(vocab, dtype=torch.float32).masked_fill(torch.arange(vocab) == 0, -math.inf)
    seeds, first = torch.arange(rows), torch.full((rows,), FIRST)
    arguments = VerifyArguments(
        row.expand(rows, 2, -1).contiguous(), torch.zeros(rows, 1, dtype=torch.int64), row.expand(rows, 1, -1),
        torch.ones(rows), seeds, seeds, first,
    )  # fmt: skip
    accepted, next_tokens = op(*(x.to(device) for x in arguments))
    gumbel = noise.gumbel(noise.key(seeds, first, noise.TARGET)[:, None], torch.arange(vocab))
    assert accepted.eq(0).all() and torch.equal(next_tokens.cpu(), (row + gumbel).argmax(-1))


@each_device
def test_the_seeds_of_a_blocks_draft_are_none_of_the_keys_of_the_noise(device):
    seeds, first = torch.arange(100), torch.full((100,), FIRST)
    hashed = hash_seeds(seeds.to(device), first.to(device)).cpu()
    assert len(set(hashed.tolist())) == 100
    assert not any(hashed.eq(noise.key(seeds, first, x)).any() for x in (noise.DRAFT, noise.ACCEPT, noise.TARGET))


@each_device
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_verifiers_uniforms_are_those_of_the_seeds_it_drafts_with(name, device):
    how, op = verifier(name, num_speculative_tokens=STEPS), KINDS[name][0]
    case = Case(TABLES)
    rows = len(case.rows)
    logits, tokens, draft_logits = (x.to(device) for x in (case.p_logits, case.tokens, case.q_logits))
    sampling, first = sampling_of(rows, 1.0), torch.full((rows,), FIRST, device=device)
    sampling = type(sampling)(*(x.to(device) for x in sampling))
    output = how.verify(logits, tokens, draft_logits, sampling=sampling, draft_positions=first)
    accept_seeds = how.draft_seeds(sampling.seeds, first)
    expected = op(logits, tokens, draft_logits, sampling.temperature, sampling.seeds, accept_seeds, first)
    assert torch.equal(output.accepted, expected[0]) and torch.equal(output.next_tokens, expected[1])
