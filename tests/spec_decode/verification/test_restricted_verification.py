"""Verification where the target may not produce every token (top-k, top-p), or the draft cannot (a token map)."""

import pytest
import torch

from spec_decode.sampling import sample_target
from spec_decode.verification import verifier
from tests.spec_decode.verification.verify_helpers import (
    COUNT,
    FIRST,
    draft_of,
    law,
    p_value,
    sampling_of,
    two_tokens,
    verified,
)

RESTRICTIONS = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "top_k and top_p": {"top_k": 4, "top_p": 0.8},
}
LOGITS = torch.tensor([3.0, 2.5, 2.0, 1.0, 0.5, 0.0])
KEPT = {"top_k": 3, "top_p": 2, "top_k and top_p": 3}
"""Which tokens 0 to n - 1 of LOGITS each restriction leaves at temperature 1: 0.46, 0.28, 0.17, 0.06, ... of it."""


@pytest.fixture(params=["rejection", "block"])
def lossless(request):
    return verifier(request.param, num_speculative_tokens=2)


@pytest.fixture(params=RESTRICTIONS)
def restriction(request):
    return RESTRICTIONS[request.param]


@pytest.mark.parametrize(
    ("name", "temperature", "likeness"),
    [
        ("top_k", 1.0, 0.0),
        ("top_p", 1.0, 0.0),
        ("top_k and top_p", 0.6, 0.6),
        ("top_k and top_p", 1.0, 0.0),
        ("top_k and top_p", 1.7, 0.9),
    ],
)
def test_the_first_two_tokens_are_jointly_distributed_as_the_restricted_target(lossless, name, temperature, likeness):
    first, second, _, _, exact = two_tokens(lossless, 5, temperature, likeness, 3, **RESTRICTIONS[name])
    assert p_value(first * 5 + second, exact[0][:, None] * exact[1], 25) > 1e-4


def test_the_token_after_a_draft_accepted_whole_is_distributed_as_the_restricted_target(lossless, restriction):
    _, _, output, (d0, d1), exact = two_tokens(lossless, 4, 1.0, 0.8, 5, **restriction)
    contexts = [(output.accepted == 2) & (d0 == a) & (d1 == b) for a in range(4) for b in range(4)]
    common = {divmod(i, 4): rows for i, rows in enumerate(contexts) if rows.sum() > 2000}
    assert common
    for context, rows in common.items():
        assert p_value(output.next_tokens[rows], exact[2][context], 4) > 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_plain_sampling_is_distributed_as_the_restricted_target(restriction, temperature):
    sampling = sampling_of(COUNT, temperature, **restriction)
    tokens = sample_target(LOGITS.expand(COUNT, -1), sampling=sampling, positions=torch.full((COUNT,), 4))
    assert p_value(tokens, law(LOGITS, temperature, **restriction), 6) > 1e-4


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_a_draft_token_outside_the_restriction_is_never_accepted_nor_added(lossless, name):
    inside = KEPT[name]
    outside = torch.arange(inside, 6).repeat(2000)[:, None]
    draft_logits = torch.full((len(outside), 1, 6), -9.0).scatter(2, outside[..., None], 0.0)
    target = LOGITS.expand(len(outside), 2, -1)
    output = verified(lossless, target, outside, draft_logits=draft_logits, temperature=1.0, **RESTRICTIONS[name])
    assert output.accepted.eq(0).all() and output.next_tokens.lt(inside).all()


def test_a_token_that_neither_model_can_produce_is_not_accepted(lossless):
    target = LOGITS.expand(500, 2, -1)
    draft_logits = torch.zeros(500, 1, 6).index_fill(2, torch.tensor([5]), -200.0)
    output = verified(lossless, target, [[5]] * 500, draft_logits=draft_logits, temperature=1.0, top_k=2)
    assert output.accepted.eq(0).all()


def test_a_draft_from_the_restricted_distribution_is_always_accepted(lossless, restriction):
    logits = LOGITS.expand(5000, 3, -1)
    draft_logits = law(logits[0, :2], 1.0, **restriction).log().float().expand(5000, -1, -1)
    tokens = torch.stack([draft_of(draft_logits[:, i], 1.0, FIRST + i) for i in range(2)], 1)
    output = verified(lossless, logits, tokens, draft_logits=draft_logits, temperature=1.0, **restriction)
    assert output.accepted.eq(2).all()


def test_a_greedy_row_ignores_its_restriction(lossless):
    # Two equal maxima: a restriction to one token could only take the wrong one away.
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0]).expand(1, 3, -1)
    output = verified(lossless, logits, [[1, 1]], temperature=0.0, top_k=1, top_p=0.01)
    assert (output.accepted.tolist(), output.next_tokens.tolist()) == ([2], [1])


@pytest.mark.parametrize("restricted", [{}, {"top_k": 4, "top_p": 0.9}], ids=["whole", "restricted"])
@pytest.mark.parametrize(("temperature", "likeness"), [(0.6, 0.9), (1.0, 0.3)])
def test_a_draft_of_a_smaller_vocabulary_leaves_the_targets_distribution(lossless, temperature, likeness, restricted):
    first, second, output, (d0, d1), exact = two_tokens(
        lossless, 5, temperature, likeness, 1, draft_vocab=3, **restricted
    )
    assert d0.max() == d1.max() == 2 and output.accepted.max() == 2 and output.next_tokens.max() > 2
    assert p_value(first * 5 + second, exact[0][:, None] * exact[1], 25) > 1e-4


def test_a_draft_of_one_possible_token_is_accepted_as_often_as_the_target_produces_it(lossless):
    draft_logits = torch.full((COUNT, 1, 6), float("-inf")).index_fill(2, torch.tensor([1]), 0.0)
    tokens = torch.ones(COUNT, 1, dtype=torch.int64)
    output = verified(lossless, LOGITS.expand(COUNT, 2, -1), tokens, temperature=1.0, draft_logits=draft_logits)
    chance = law(LOGITS, 1.0)[1]
    assert p_value(output.accepted, [1 - chance, chance], 2) > 1e-4
    assert output.next_tokens[output.accepted == 0].ne(1).all()
