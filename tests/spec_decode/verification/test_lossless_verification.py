from functools import cache

import pytest
import torch
from scipy import stats

from spec_decode.sampling import Sampling, SamplingParams, sample_target
from spec_decode.verification import verifier
from tests.spec_decode.verification.verify_helpers import (
    COUNT,
    FIRST,
    draft_of,
    p_value,
    peaked,
    sampling_of,
    two_tokens,
    verified,
)


@pytest.fixture(scope="module", params=["rejection", "block"])
def lossless(request):
    return verifier(request.param, num_speculative_tokens=3)


GREEDY = {
    "all accepted": ([1, 2, 3, 4], [1, 2, 3], 3, 4),
    "none accepted": ([1, 2, 3, 4], [5, 2, 3], 0, 1),
    "a middle one rejected": ([1, 2, 3, 4], [1, 7, 3], 1, 2),
    "the last one rejected": ([1, 2, 3, 4], [1, 2, 7], 2, 3),
    "the draft ends early": ([1, 2, 3, 4], [1, -1, 3], 1, 2),
    "the draft is empty": ([1, 2, 3, 4], [-1, -1, -1], 0, 1),
    "the draft ends after all that was proposed": ([1, 2, 3, 4], [1, 2, -1], 2, 3),
    "no token is not token 0": ([0, 2, 3, 4], [-1, 2, 3], 0, 0),
}


@pytest.mark.parametrize(("target", "draft", "accepted", "added"), GREEDY.values(), ids=GREEDY)
def test_greedy_accepts_the_longest_prefix_and_adds_the_targets_own_token(lossless, target, draft, accepted, added):
    output = verified(lossless, peaked([target]), [draft])
    assert (output.accepted.tolist(), output.next_tokens.tolist()) == ([accepted], [added])


def test_rows_are_verified_independently(lossless):
    cases = list(GREEDY.values())
    output = verified(lossless, peaked([case[0] for case in cases]), [case[1] for case in cases])
    assert output.accepted.tolist() == [case[2] for case in cases]
    assert output.next_tokens.tolist() == [case[3] for case in cases]


def test_temperatures_are_each_rows_own(lossless):
    logits = torch.zeros(2, 2, 8).repeat(200, 1, 1)
    logits[..., 3] = 1.0
    tokens = torch.full((400, 1), 3)
    params = [SamplingParams(temperature=float(row % 2), seed=row) for row in range(400)]
    output = lossless.verify(
        logits, tokens, logits[:, :1] * 5, sampling=Sampling.of(params, "cpu"), draft_positions=torch.full((400,), 9)
    )
    assert output.accepted[::2].eq(1).all() and 0 < output.accepted[1::2].sum() < 200


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_draft_from_the_targets_own_distribution_is_always_accepted(lossless, temperature):
    logits = torch.randn(2000, 4, 8, generator=torch.Generator().manual_seed(0))
    draft_logits = logits[:, :3] / temperature
    tokens = torch.distributions.Categorical(logits=draft_logits).sample()
    output = verified(lossless, logits, tokens, temperature=temperature, draft_logits=draft_logits)
    assert output.accepted.eq(3).all()


def test_a_random_draft_that_ends_early_is_not_accepted_beyond_its_end(lossless):
    logits = torch.zeros(500, 4, 8)
    tokens = torch.tensor([[3, -1, 3]]).expand(500, -1)
    output = verified(lossless, logits, tokens, temperature=1.0, draft_logits=logits[:, :3])
    assert output.accepted.eq(1).all()


def test_a_token_that_the_target_cannot_produce_is_never_accepted(lossless):
    logits = torch.zeros(2000, 2, 8)
    logits[..., 3] = float("-inf")
    output = verified(lossless, logits, torch.full((2000, 1), 3), temperature=1.0, draft_logits=torch.zeros(2000, 1, 8))
    assert output.accepted.eq(0).all() and output.next_tokens.ne(3).all()


def test_a_rejected_token_is_never_what_replaces_it(lossless):
    target, draft = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    tokens = draft_of(draft.expand(5000, -1), 1.0, FIRST)
    output = verified(
        lossless, target.expand(5000, 2, -1), tokens[:, None], temperature=1.0, draft_logits=draft.expand(5000, 1, -1)
    )
    rejected = output.accepted == 0
    assert rejected.any() and (output.next_tokens[rejected] != tokens[rejected]).all()


CASES = [
    (temperature, likeness, seed)
    for seed, (temperature, likeness) in enumerate((t, k) for t in (0.6, 1.0, 1.7) for k in (0.0, 0.6, 0.95))
]


@cache
def first_two(lossless, temperature, likeness, seed):
    """The first token and the second of each request, of 5, and the laws that they should have."""
    first, second, _, _, exact = two_tokens(lossless, 5, temperature, likeness, seed)
    return first, second, exact


@pytest.mark.parametrize(("temperature", "likeness", "seed"), CASES)
def test_the_first_token_is_distributed_as_the_targets(lossless, temperature, likeness, seed):
    first, _, exact = first_two(lossless, temperature, likeness, seed)
    assert p_value(first, exact[0], 5) > 1e-4


@pytest.mark.parametrize(("temperature", "likeness", "seed"), CASES)
def test_the_first_two_tokens_are_jointly_distributed_as_the_targets(lossless, temperature, likeness, seed):
    first, second, exact = first_two(lossless, temperature, likeness, seed)
    assert p_value(first * 5 + second, exact[0][:, None] * exact[1], 25) > 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_the_token_after_a_draft_accepted_whole_is_distributed_as_the_targets(lossless, temperature):
    _, _, output, (d0, d1), exact = two_tokens(lossless, 3, temperature, 0.8, 5)
    for a in range(3):
        for b in range(3):
            whole = (output.accepted == 2) & (d0 == a) & (d1 == b)
            if whole.sum() > 500:
                assert p_value(output.next_tokens[whole], exact[2][a, b], 3) > 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_draft_is_accepted_as_often_as_the_overlap_of_the_two_distributions(lossless, temperature):
    generator = torch.Generator().manual_seed(9)
    p, q = torch.randn(2, 10, generator=generator)
    tokens = draft_of(q.expand(COUNT, -1), temperature, FIRST)
    output = verified(
        lossless, p.expand(COUNT, 2, -1), tokens[:, None], temperature=temperature,
        draft_logits=q.expand(COUNT, 1, -1) / temperature,
    )  # fmt: skip
    overlap = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum().item()
    assert stats.binomtest(int(output.accepted.sum()), COUNT, overlap).pvalue > 1e-4


@pytest.mark.parametrize("proposed", [0, 2])
def test_a_token_after_a_whole_or_an_empty_draft_is_the_one_plain_decoding_draws_there(lossless, proposed):
    logits = torch.randn(500, 3, 8, generator=torch.Generator().manual_seed(2))
    tokens = torch.distributions.Categorical(logits=logits[:, :2]).sample() if proposed else torch.full((500, 2), -1)
    output = verified(lossless, logits, tokens, temperature=1.0, draft_logits=logits[:, :2])
    plain = sample_target(
        logits[:, proposed], sampling=sampling_of(500, 1.0), positions=torch.full((500,), FIRST + proposed)
    )
    assert output.accepted.eq(proposed).all() and torch.equal(output.next_tokens, plain)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_where_nothing_was_proposed_the_next_token_is_distributed_as_the_targets(lossless, temperature):
    logits = torch.randn(8, generator=torch.Generator().manual_seed(2))
    output = verified(lossless, logits.expand(COUNT, 2, -1), torch.full((COUNT, 1), -1), temperature=temperature)
    assert p_value(output.next_tokens, (logits.double() / temperature).softmax(-1), 8) > 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_plain_sampling_is_distributed_as_the_target(temperature):
    logits = torch.randn(8, generator=torch.Generator().manual_seed(2))
    one_seed = sampling_of(COUNT, temperature, seeds=torch.full((COUNT,), 3))
    tokens = sample_target(logits.expand(COUNT, -1), sampling=one_seed, positions=torch.arange(COUNT))
    assert p_value(tokens, (logits.double() / temperature).softmax(-1), 8) > 1e-4


def test_plain_sampling_at_temperature_0_takes_the_argmax():
    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(2))
    tokens = sample_target(logits, sampling=sampling_of(20), positions=torch.zeros(20, dtype=torch.int64))
    assert tokens.tolist() == logits.argmax(-1).tolist()
