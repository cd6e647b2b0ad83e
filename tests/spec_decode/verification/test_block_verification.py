"""Block verification against an fp64 oracle in plain Python that enumerates every draft of a tiny vocabulary."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from spec_decode.verification import BlockVerification, verifier
from tests.spec_decode.verification.verify_helpers import COUNT, FIRST, draft_of, law, p_value, verified

VOCAB, STEPS = 3, 3
DRAFTS = list(itertools.product(range(VOCAB), repeat=STEPS))
SEEDS = 2000


class ModelPair:
    """A target and a draft over a tiny vocabulary: logits and distributions by context, a tuple of tokens."""

    def __init__(self, temperature, likeness, seed, **restriction):
        rng = random.Random(seed)
        contexts = [c for n in range(STEPS + 1) for c in itertools.product(range(VOCAB), repeat=n)]
        self.sampling = {"temperature": temperature, **restriction}
        self.p_logits = {c: [rng.gauss(0, 1.5) for _ in range(VOCAB)] for c in contexts}
        self.q_logits = {
            c: [(likeness * x + (1 - likeness) * rng.gauss(0, 1.5)) / temperature for x in self.p_logits[c]]
            for c in contexts
        }
        self.p = {c: law(torch.tensor(x), temperature, **restriction).tolist() for c, x in self.p_logits.items()}
        self.q = {c: law(torch.tensor(x), 1.0).tolist() for c, x in self.q_logits.items()}

    def chance(self, table, tokens):
        return math.prod(table[tokens[:i]][token] for i, token in enumerate(tokens))

    def weights(self, draft):
        weights = [1.0]
        for i, token in enumerate(draft):
            weights.append(min(1.0, weights[-1] * self.p[draft[:i]][token] / self.q[draft[:i]][token]))
        return weights

    def residual(self, context, weight):
        return [max(weight * p - q, 0.0) for p, q in zip(self.p[context], self.q[context], strict=True)]

    def block_accepted(self, draft):
        """Probability of each accepted length, given the draft."""
        weights = self.weights(draft)
        passes = [1.0]
        for i in range(1, len(draft)):
            excess = sum(self.residual(draft[:i], weights[i]))
            passes.append(excess / (excess + 1 - weights[i]))
        passes.append(weights[-1])
        return [passes[i] * math.prod(1 - h for h in passes[i + 1 :]) for i in range(len(draft) + 1)]

    def rejection_accepted(self, draft):
        passes = [min(1.0, self.p[draft[:i]][t] / self.q[draft[:i]][t]) for i, t in enumerate(draft)]
        ends = [*(1 - k for k in passes), 1.0]
        return [math.prod(passes[:i]) * ends[i] for i in range(len(draft) + 1)]

    def block_outputs(self, draft):
        """Probability of each (accepted length, next token), given the draft; [len(draft) + 1, VOCAB]."""
        weights, law = self.weights(draft), []
        for length, chance in enumerate(self.block_accepted(draft)):
            context = draft[:length]
            wanted = self.p[context] if length == len(draft) else self.residual(context, weights[length])
            law.append([chance * x / sum(wanted) if chance else 0.0 for x in wanted])
        return law

    def mean(self, accepted):
        return sum(
            self.chance(self.q, draft) * sum(n * x for n, x in enumerate(getattr(self, accepted)(draft)))
            for draft in DRAFTS
        )

    def verified(self, how, drafts, which):
        """The output for a row for each of `which` int64 [R], an index into drafts; -1 ends a draft."""
        contexts = [tuple(max(0, token) for token in draft) for draft in drafts]
        p = torch.tensor([[self.p_logits[c[:i]] for i in range(STEPS + 1)] for c in contexts])
        q = torch.tensor([[self.q_logits[c[:i]] for i in range(STEPS)] for c in contexts])
        return verified(how, p[which], torch.tensor(drafts)[which], draft_logits=q[which], **self.sampling)


PAIRS = {
    f"temperature {temperature}, likeness {likeness}": ModelPair(temperature, likeness, seed)
    for seed, (temperature, likeness) in enumerate(itertools.product((0.6, 1.0, 1.7), (0.0, 0.5, 0.9)))
}
each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
RESTRICTED = {
    "top_k": ModelPair(1.0, 0.5, 10, top_k=2),
    "top_p": ModelPair(1.7, 0.5, 11, top_p=0.8),
    "top_k and top_p": ModelPair(0.6, 0.0, 12, top_k=2, top_p=0.9),
}


@each_pair
def test_the_oracle_preserves_the_targets_distribution(pair):
    found = dict.fromkeys(itertools.product(range(VOCAB), repeat=STEPS + 1), 0.0)
    for draft in DRAFTS:
        for length, row in enumerate(pair.block_outputs(draft)):
            for token, chance in enumerate(row):
                text_so_far = (*draft[:length], token)
                for rest in itertools.product(range(VOCAB), repeat=STEPS - length):
                    later = pair.chance(pair.p, text_so_far + rest) / pair.chance(pair.p, text_so_far)
                    found[text_so_far + rest] += pair.chance(pair.q, draft) * chance * later
    for text, chance in found.items():
        assert chance == pytest.approx(pair.chance(pair.p, text), abs=1e-12)


def law_p_value(accepted, next_tokens, outputs):
    """How likely these outputs are under the oracle's law; what it rules out must not occur at all."""
    expected = np.array(outputs).ravel() * len(accepted)
    found = np.bincount((accepted * VOCAB + next_tokens).numpy(), minlength=expected.size)
    assert not found[expected < 1e-9].any()
    rare = expected < 10
    pairs = [(found[~rare], expected[~rare]), ([found[rare].sum()], [expected[rare].sum()])]
    found, expected = (np.concatenate(x) for x in zip(*pairs, strict=True))
    return stats.chisquare(found[expected > 0], expected[expected > 0]).pvalue if (expected > 0).sum() > 1 else 1.0


ALL_PAIRS = PAIRS | RESTRICTED


@pytest.mark.parametrize("pair", ALL_PAIRS.values(), ids=ALL_PAIRS)
def test_the_output_for_every_draft_is_distributed_as_the_oracles(pair):
    output = pair.verified(BlockVerification(), DRAFTS, torch.arange(len(DRAFTS)).repeat_interleave(SEEDS))
    accepted, added = (x.view(-1, SEEDS) for x in (output.accepted, output.next_tokens))
    worst = min(law_p_value(accepted[i], added[i], pair.block_outputs(d)) for i, d in enumerate(DRAFTS))
    assert worst > 1e-5


@pytest.mark.parametrize("length", [1, 2])
def test_a_draft_that_ends_early_is_a_shorter_block(length):
    pair = PAIRS["temperature 1.0, likeness 0.5"]
    for draft in itertools.product(range(VOCAB), repeat=length):
        ended = (*draft, *(-1 if i == length else 2 for i in range(length, STEPS)))
        output = pair.verified(BlockVerification(), [ended], torch.zeros(SEEDS, dtype=torch.int64))
        assert law_p_value(output.accepted, output.next_tokens, pair.block_outputs(draft)) > 1e-5


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_what_follows_the_end_of_a_draft_is_not_read(name):
    how = verifier(name, num_speculative_tokens=STEPS)
    p, q = torch.randn(2, 2000, STEPS + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    drafts = torch.tensor([[0, 1, -1], [2, -1, 1], [-1, 0, 2], [1, 1, 1]]).repeat(500, 1)
    after = (drafts < 0).long().cummax(1).values.bool()[..., None]
    clean = verified(how, p, drafts, temperature=1.0, draft_logits=q[:, 1:])
    poisoned = torch.cat([p[:, :1], p[:, 1:].masked_fill(after, math.nan)], 1)
    dirty = verified(how, poisoned, drafts, temperature=1.0, draft_logits=q[:, 1:].masked_fill(after, math.nan))
    assert torch.equal(clean.accepted, dirty.accepted) and torch.equal(clean.next_tokens, dirty.next_tokens)


@each_pair
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_the_mean_accepted_length_is_the_enumerated_one(name, pair):
    chances = torch.tensor([pair.chance(pair.q, draft) for draft in DRAFTS], dtype=torch.float64)
    drawn = torch.multinomial(chances, COUNT, replacement=True, generator=torch.Generator().manual_seed(1))
    accepted = pair.verified(verifier(name, num_speculative_tokens=STEPS), DRAFTS, drawn).accepted
    error = accepted.double().std().item() / math.sqrt(len(drawn))
    assert abs(accepted.double().mean().item() - pair.mean(f"{name}_accepted")) < 4 * error


@each_pair
def test_block_verification_accepts_more_than_rejection_sampling_on_average(pair):
    assert pair.mean("block_accepted") > pair.mean("rejection_accepted") + 0.001


TEXTS = 2 * COUNT
"""So many show noise that is used twice."""


def texts(how, draft_seeds, length):
    """Joint index of the first `length` tokens of TEXTS requests, of rounds over a Markov chain, and its law."""
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, VOCAB, VOCAB, generator=generator) * 1.5
    row, seeds = torch.arange(TEXTS), torch.arange(TEXTS)
    text, size = torch.zeros(TEXTS, length * (STEPS + 1) + 1, dtype=torch.int64), torch.ones(TEXTS, dtype=torch.int64)
    while size.min() <= length:
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
    chain, law = p.double().softmax(-1), torch.ones(1, dtype=torch.float64)
    for tokens in itertools.product(range(VOCAB), repeat=length):
        steps = [chain[a, b] for a, b in zip((0, *tokens), tokens, strict=False)]
        law = torch.cat([law, torch.stack(steps).prod()[None]])
    place = VOCAB ** torch.arange(length - 1, -1, -1)
    return (text[:, 1 : length + 1] * place).sum(1), law[1:]


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_text_of_many_rounds_is_distributed_as_the_targets(name):
    how = verifier(name, num_speculative_tokens=STEPS)
    assert p_value(*texts(how, how.draft_seeds, 4), VOCAB**4) > 1e-4


class StaleSeeds(BlockVerification):
    def draft_seeds(self, seeds, draft_positions):
        return seeds


STALE = {
    "drafts": (BlockVerification(), StaleSeeds().draft_seeds),
    "accept uniforms": (StaleSeeds(), BlockVerification().draft_seeds),
}


@pytest.mark.parametrize(("how", "draft_seeds"), STALE.values(), ids=STALE)
def test_noise_used_twice_for_a_block_would_change_the_distribution(how, draft_seeds):
    # Not a promise but the reason for draft_seeds, and the proof that the test above would notice.
    assert p_value(*texts(how, draft_seeds, 4), VOCAB**4) < 1e-5
