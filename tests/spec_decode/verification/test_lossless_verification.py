"""Verifiers that preserve the target's distribution: what rows accept, and texts of drafts drawn by the drafter's own
sampler. test_exact_verification.py checks that each output follows from its noise."""

import itertools
import math

import pytest
import torch

from spec_decode.sampling import Sampling, SamplingParams
from spec_decode.sampling.logit_edits import Bias
from spec_decode.sampling.target_sampler import sample_target
from spec_decode.verification import BlockVerification, verifier
from tests.spec_decode.verification.verify_helpers import (
    COUNT,
    FIRST,
    Edit,
    draft_of,
    law,
    p_value,
    peaked,
    sampling_of,
    two_tokens,
    verified,
)

RESTRICTIONS = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "top_k and top_p": {"top_k": 4, "top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "all three": {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
}
PENALTIES = {"repetition": 1.5, "presence": 0.7, "frequency": 1.2}
LOGITS = torch.tensor([3.0, 2.5, 2.0, 1.0, 0.5, 0.0])


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


def test_greedy_accepts_longest_prefix_and_adds_target_token(lossless):
    targets, drafts, *wanted = zip(*GREEDY.values(), strict=True)
    output = verified(lossless, peaked(targets), drafts)
    found = zip(output.accepted.tolist(), output.next_tokens.tolist(), strict=True)
    assert dict(zip(GREEDY, found, strict=True)) == dict(zip(GREEDY, zip(*wanted, strict=True), strict=True))


def test_a_greedy_row_ignores_its_restriction(lossless):
    # Two equal maxima: a restriction to one token could only take the wrong one away.
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0]).expand(1, 3, -1)
    output = verified(lossless, logits, [[1, 1]], temperature=0.0, top_k=1, top_p=0.01)
    assert (output.accepted.tolist(), output.next_tokens.tolist()) == ([2], [1])


def test_temperature_applies_per_row(lossless):
    logits = torch.zeros(2, 2, 8).repeat(200, 1, 1)
    logits[..., 3] = 1.0
    sampling = Sampling.of([SamplingParams(temperature=float(row % 2), seed=row) for row in range(400)], "cpu")
    output = lossless.verify(
        logits, torch.full((400, 1), 3), logits[:, :1] * 5, sampling=sampling, draft_positions=torch.full((400,), 9)
    )
    assert output.accepted[::2].eq(1).all() and 0 < output.accepted[1::2].sum() < 200


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draft_from_target_distribution_is_always_accepted(lossless, temperature):
    logits = torch.randn(2000, 4, 8, generator=torch.Generator().manual_seed(0))
    draft_logits = logits[:, :3] / temperature
    tokens = torch.distributions.Categorical(logits=draft_logits).sample()
    output = verified(lossless, logits, tokens, temperature=temperature, draft_logits=draft_logits)
    assert output.accepted.eq(3).all()


@pytest.mark.parametrize("restriction", RESTRICTIONS.values(), ids=RESTRICTIONS)
def test_restricted_draft_is_accepted_and_outside_token_never(lossless, restriction):
    kept = law(LOGITS, 1.0, **restriction)
    inside = kept.log().float().expand(5000, 2, -1)
    tokens = torch.stack([draft_of(inside[:, i], 1.0, FIRST + i) for i in range(2)], 1)
    logits = LOGITS.expand(5000, 3, -1)
    output = verified(lossless, logits, tokens, draft_logits=inside, temperature=1.0, **restriction)
    assert output.accepted.eq(2).all()
    # Of the tokens outside, the draft can hardly produce one either.
    outside = kept.eq(0).nonzero().repeat(1000, 1)
    q = torch.full((len(outside), 1, 6), -9.0).scatter(2, outside[..., None], 0.0).index_fill(2, outside[0], -200.0)
    output = verified(lossless, logits[: len(q), :2], outside, draft_logits=q, temperature=1.0, **restriction)
    assert output.accepted.eq(0).all() and (kept[output.next_tokens] > 0).all()


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_tokens_after_draft_end_are_not_read(name):
    how = verifier(name, num_speculative_tokens=3)
    p, q = torch.randn(2, 2000, 4, 3, generator=torch.Generator().manual_seed(0))
    drafts = torch.tensor([[0, 1, -1], [2, -1, 1], [-1, 0, 2], [1, 1, 1]]).repeat(500, 1)
    after = (drafts < 0).long().cummax(1).values.bool()[..., None]
    clean = verified(how, p, drafts, temperature=1.0, draft_logits=q[:, 1:])
    poisoned = torch.cat([p[:, :1], p[:, 1:].masked_fill(after, math.nan)], 1)
    dirty = verified(how, poisoned, drafts, temperature=1.0, draft_logits=q[:, 1:].masked_fill(after, math.nan))
    assert torch.equal(clean.accepted, dirty.accepted) and torch.equal(clean.next_tokens, dirty.next_tokens)


def test_nan_draft_logits_end_the_draft_there(lossless):
    p, q = torch.randn(2, 2000, 4, 5, generator=torch.Generator().manual_seed(0))
    ends = torch.arange(2000)[:, None] % 4
    is_nan = torch.arange(3) >= ends
    drafts = draft_of(q[:, :3].flatten(0, 1), 1.0, FIRST).view(2000, 3)
    found = verified(
        lossless, p, drafts, draft_logits=q[:, :3].masked_fill(is_nan[..., None], math.nan), temperature=1.0
    )
    wanted = verified(lossless, p, drafts.masked_fill(is_nan, -1), draft_logits=q[:, :3], temperature=1.0)
    assert torch.equal(found.accepted, wanted.accepted) and torch.equal(found.next_tokens, wanted.next_tokens)
    assert found.accepted.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("proposed", [0, 2])
def test_next_token_matches_plain_sampling_at_draft_end(lossless, proposed):
    logits = torch.randn(500, 3, 8, generator=torch.Generator().manual_seed(2))
    tokens = torch.distributions.Categorical(logits=logits[:, :2]).sample() if proposed else torch.full((500, 2), -1)
    output = verified(lossless, logits, tokens, temperature=1.0, draft_logits=logits[:, :2])
    plain = sample_target(
        logits[:, proposed], sampling=sampling_of(500, 1.0), positions=torch.full((500,), FIRST + proposed)
    )
    assert output.accepted.eq(proposed).all() and torch.equal(output.next_tokens, plain)


@pytest.mark.parametrize("restriction", [{}, *RESTRICTIONS.values()], ids=["whole", *RESTRICTIONS])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_plain_sampling_follows_target_distribution(temperature, restriction):
    one_seed = sampling_of(COUNT, temperature, seeds=torch.full((COUNT,), 3), **restriction)
    tokens = sample_target(LOGITS.expand(COUNT, -1), sampling=one_seed, positions=torch.arange(COUNT))
    if temperature:
        assert p_value(tokens, law(LOGITS, temperature, **restriction), 6) > 1e-4
    else:
        assert tokens.eq(0).all()


TWO = {
    "cold, a draft that knows nothing": (0.6, 0.0, {}),
    "a draft that knows something": (1.0, 0.6, {}),
    "hot, a draft that knows much": (1.7, 0.95, {}),
    "top_k": (1.0, 0.0, RESTRICTIONS["top_k"]),
    "top_p": (1.0, 0.0, RESTRICTIONS["top_p"]),
    "top_k and top_p": (0.6, 0.6, RESTRICTIONS["top_k and top_p"]),
    "min_p": (1.0, 0.3, {"min_p": 0.2, "count": 200_000}),
    "all three": (1.3, 0.5, {**RESTRICTIONS["all three"], "count": 200_000}),
    "a bias": (0.8, 0.3, {"edit": Edit(Bias(1, 1.5, 99), Bias(3, -2.0, 99)), "count": 200_000}),
    "a token forbidden once": (1.0, 0.9, {"edit": Edit(Bias(2, -math.inf, FIRST + 1)), "count": 200_000, "top_k": 4}),
    "penalties": (0.8, 0.5, {"edit": Edit(prompt=[1, 3], output=[0, 0, 3], **PENALTIES), "count": 200_000}),
    "rewards": (1.0, 0.9, {"edit": Edit(output=[2], repetition=0.7, presence=-0.5, frequency=-1.0), "count": 200_000}),
    "all edits": (1.2, 0.3, {"edit": Edit(Bias(1, 1.5, 99), prompt=[2], **PENALTIES), "count": 200_000, "top_p": 0.9}),
    "a smaller vocabulary": (0.6, 0.9, {"draft_vocab": 3}),
    "a smaller vocabulary, top_k and top_p": (1.0, 0.3, {"draft_vocab": 3, "top_k": 4, "top_p": 0.9}),
}


OFTEN = ("a draft that knows something", "top_k and top_p", "min_p", "penalties", "a smaller vocabulary")


@pytest.mark.parametrize(
    ("temperature", "likeness", "options"),
    [pytest.param(*each, marks=() if name in OFTEN else pytest.mark.slow, id=name) for name, each in TWO.items()],
)
def test_first_two_tokens_follow_joint_target_distribution(lossless, temperature, likeness, options):
    texts, joint, output = two_tokens(lossless, temperature, likeness, 3, **options)
    assert p_value(texts, joint, 25) > 1e-4 and output.accepted.unique().tolist() == [0, 1, 2]


VOCAB, STEPS, LENGTH = 3, 3, 3
TEXTS = 2 * COUNT
"""So many show noise that is used twice."""


def texts_p_value(how, draft_seeds):
    """Of the first LENGTH tokens of TEXTS requests, of rounds over a Markov chain."""
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, VOCAB, VOCAB, generator=generator) * 1.5
    row, seeds = torch.arange(TEXTS), torch.arange(TEXTS)
    text, size = torch.zeros(TEXTS, LENGTH * (STEPS + 1) + 1, dtype=torch.int64), torch.ones(TEXTS, dtype=torch.int64)
    while size.min() <= LENGTH:
        drafts, previous, first = [], [text[row, size - 1]], FIRST + size
        for step in range(STEPS):
            drafts.append(draft_of(q[previous[-1]], 1.0, first + step, draft_seeds(seeds, first)))
            previous.append(drafts[-1])
        output = verified(
            how, torch.stack([p[x] for x in previous], 1), torch.stack(drafts, 1), temperature=1.0,
            draft_logits=torch.stack([q[x] for x in previous[:-1]], 1), first=first,
        )  # fmt: skip
        for step, token in enumerate(drafts):
            text[row, size + step] = token
        size = size + output.accepted
        text[row, size] = output.next_tokens
        size = size + 1
    chain = p.double().softmax(-1).tolist()
    chances = [
        math.prod(chain[a][b] for a, b in itertools.pairwise((0, *tokens)))
        for tokens in itertools.product(range(VOCAB), repeat=LENGTH)
    ]
    place = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    return p_value((text[:, 1 : LENGTH + 1] * place).sum(1), chances, VOCAB**LENGTH)


def test_text_of_many_rounds_follows_target_distribution(lossless):
    assert texts_p_value(lossless, lossless.draft_seeds) > 1e-4


class StaleSeeds(BlockVerification):
    def draft_seeds(self, seeds, draft_positions):
        return seeds


STALE = {
    "drafts": (BlockVerification(), StaleSeeds().draft_seeds),
    "accept uniforms": (StaleSeeds(), BlockVerification().draft_seeds),
}


@pytest.mark.parametrize(("how", "draft_seeds"), STALE.values(), ids=STALE)
def test_reused_block_noise_changes_distribution(how, draft_seeds):
    # Not a promise but the reason for draft_seeds, and the proof that the test above would notice.
    assert texts_p_value(how, draft_seeds) < 1e-5
