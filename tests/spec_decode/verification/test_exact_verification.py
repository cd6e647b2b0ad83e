"""Every output of a verifier follows from its noise: fp64 in plain Python gets the same from the same uniforms and
Gumbel noise, for every draft of a tiny vocabulary. No statistics: a biased weight or threshold shows in a few rows."""

import itertools
import math

import pytest
import torch

from spec_decode.sampling import Sampling, noise
from spec_decode.verification import verifier
from spec_decode.verification.kernels.block_verify import block_verify
from spec_decode.verification.kernels.hash_seeds import hash_seeds
from spec_decode.verification.kernels.rejection_sample import rejection_sample
from spec_decode.verification.kernels.synthetic_accept import synthetic_accept
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.spec_decode.sampling.noise_words import each_device, seeds_of
from tests.spec_decode.verification.verify_helpers import sampling_of
from tests.spec_decode.verification.verify_oracle import (
    DRAFTS,
    ENDED,
    FIRST,
    STEPS,
    VOCAB,
    Case,
    block_lengths,
    block_oracle,
    block_passes,
    next_law,
    rejection_lengths,
    rejection_oracle,
    rejection_passes,
)

TABLES = 8
KINDS = {
    "rejection": (rejection_sample, rejection_oracle, rejection_passes),
    "block": (block_verify, block_oracle, block_passes),
}
each_kind = pytest.mark.parametrize(("op", "oracle", "passes"), KINDS.values(), ids=KINDS)
RESTRICTIONS = {
    "whole": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "top_p": {"temperature": 1.7, "top_p": 0.8},
    "top_k and top_p": {"temperature": 0.6, "top_k": 2, "top_p": 0.9},
}


def test_oracles_preserve_target_distribution():
    case, texts = Case(TABLES), list(itertools.product(range(VOCAB), repeat=STEPS + 1))
    for table in range(TABLES):
        row = table * len(DRAFTS + ENDED)
        p, q, means = case.p[row], case.q[row], []
        for lengths in (rejection_lengths, block_lengths):
            found, mean = dict.fromkeys(texts, 0.0), 0.0
            for draft in DRAFTS:
                drafted = math.prod(q[i][token] for i, token in enumerate(draft))
                for accepted, (chance, weight) in enumerate(lengths(p, q, draft)):
                    wanted, mean = next_law(p, q, draft, accepted, weight), mean + drafted * chance * accepted
                    for text in (text for text in texts if chance and text[:accepted] == draft[:accepted]):
                        later = math.prod(p[i][text[i]] for i in range(accepted + 1, STEPS + 1))
                        found[text] += drafted * chance * wanted[text[accepted]] / sum(wanted) * later
            means.append(mean)
            assert found == pytest.approx({text: math.prod(p[i][t] for i, t in enumerate(text)) for text in texts})
        assert means[1] > means[0]


@each_device
@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_every_output_matches_its_noise(op, oracle, passes, seed, device):
    case = Case(TABLES)
    seeds = torch.arange(len(case.rows)) * 3 + seed
    case.check(case.run(op, seeds, device), oracle, seeds)


@each_device
@pytest.mark.parametrize("restriction", RESTRICTIONS.values(), ids=RESTRICTIONS)
@pytest.mark.parametrize("name", KINDS)
def test_verify_output_follows_restrictions_and_seeds(name, restriction, device):
    how, case = verifier(name, num_speculative_tokens=STEPS), Case(TABLES, **restriction)
    logits, tokens, draft_logits, first = (
        x.to(device) for x in (case.p_logits, case.tokens, case.q_logits, case.first)
    )
    sampling = Sampling(*(x.to(device) for x in sampling_of(len(case.rows), **restriction, seeds=case.seeds).rows))
    output = how.verify(logits, tokens, draft_logits, sampling=sampling, draft_positions=first)
    case.check((output.accepted, output.next_tokens), KINDS[name][1], how.draft_seeds(sampling.seeds, first).cpu())


@each_device
@each_kind
@pytest.mark.parametrize("column", range(STEPS))
@pytest.mark.parametrize("factor", [1 - 1e-4, 1 + 1e-4], ids=["just below", "just above"])
def test_each_prefix_is_accepted_up_to_its_probability(op, oracle, passes, column, factor, device):
    case = Case(TABLES)
    chances = [passes(p, q, draft) for p, q, draft in zip(case.p, case.q, case.drafts, strict=True)]
    wanted = [x[column] * factor if column < len(x) and 0 < x[column] < 0.999 else 0.5 for x in chances]
    seeds = seeds_of(torch.tensor(wanted, dtype=torch.float64), torch.tensor(FIRST + column), noise.ACCEPT)
    case.check(case.run(op, seeds, device), oracle, seeds, 2e-5)


@each_device
@each_kind
@pytest.mark.parametrize(("factor", "accepted"), [(1 - 1e-4, 1), (1 + 1e-4, 0)], ids=["just below", "just above"])
@pytest.mark.parametrize("p", [1e-3, 1e-9, 1e-15])
def test_token_is_accepted_up_to_tiny_probability(op, oracle, passes, p, factor, accepted, device):
    seeds = seeds_of(torch.tensor([p * factor], dtype=torch.float64), torch.tensor([FIRST]), noise.ACCEPT)
    row = torch.tensor([math.log(p), math.log1p(-p)])
    arguments = VerifyArguments(
        row.expand(1, 2, -1).contiguous(), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[[0.0, -80.0]]]),
        torch.ones(1), seeds, seeds, torch.tensor([FIRST]),
    )  # fmt: skip
    assert op(*(x.to(device) for x in arguments))[0].tolist() == [accepted]


@each_device
@pytest.mark.parametrize("fraction", [0.25, 1e-9, 1e-15])
def test_synthetic_acceptance_of_tiny_mean_is_exact(fraction, device):
    wanted = torch.tensor([fraction * (1 - 1e-4), fraction * (1 + 1e-4)], dtype=torch.float64)
    first = torch.full((2,), FIRST)
    seeds = seeds_of(wanted, first, noise.ACCEPT)
    drafts = torch.zeros(2, STEPS, dtype=torch.int64)
    assert synthetic_accept(*(x.to(device) for x in (drafts, seeds, first)), fraction)[0].tolist() == [1, 0]


@each_device
@each_kind
def test_empty_residual_samples_from_target(op, oracle, passes, device):
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
def test_block_draft_seeds_differ_from_noise_keys(device):
    seeds, first = torch.arange(100), torch.full((100,), FIRST)
    hashed = hash_seeds(seeds.to(device), first.to(device)).cpu()
    assert len(set(hashed.tolist())) == 100
    assert not any(hashed.eq(noise.key(seeds, first, x)).any() for x in (noise.DRAFT, noise.ACCEPT, noise.TARGET))
