"""A verifier's output computed in fp64 and plain Python, from both laws, the uniforms and the Gumbel noise."""

import itertools
import math

import torch

from spec_decode.sampling import noise
from spec_decode.verification.kernels.verify_arguments import VerifyArguments
from tests.spec_decode.verification.verify_helpers import law

VOCAB, STEPS, FIRST = 3, 3, 30
DRAFTS = list(itertools.product(range(VOCAB), repeat=STEPS))
ENDED = [(1, -1, -1), (2, 0, -1), (-1, -1, -1)]


def rejection_passes(p, q, draft):
    """For each prefix: whether all earlier ones must pass too, and the probability that it passes."""
    return [min(1.0, p[i][t] / q[i][t]) for i, t in enumerate(draft)]


def weights_of(p, q, draft):
    weights = [1.0]
    for i, t in enumerate(draft):
        weights.append(min(1.0, weights[-1] * p[i][t] / q[i][t]))
    return weights


def residual(p, q, weight):
    return [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def block_passes(p, q, draft):
    weights = weights_of(p, q, draft)
    sums = [sum(residual(p[i], q[i], weights[i])) for i in range(1, len(draft))]
    return [s / (s + 1 - w) if s else 0.0 for s, w in zip(sums, weights[1:], strict=False)] + weights[len(draft) :][:1]


def rejection_oracle(p, q, draft, uniforms):
    accepted = next((i for i, c in enumerate(rejection_passes(p, q, draft)) if uniforms[i] >= c), len(draft))
    return accepted, 1.0


def block_oracle(p, q, draft, uniforms):
    chances = block_passes(p, q, draft) if draft else []
    accepted = max((i for i, c in enumerate(chances, 1) if uniforms[i - 1] <= c), default=0)
    return accepted, weights_of(p, q, draft)[accepted]


def rejection_lengths(p, q, draft):
    """Return the probability of each accepted length, and the target law's weight in the token after it."""
    passes = rejection_passes(p, q, draft)
    ends = [*(1 - chance for chance in passes), 1.0]
    return [(math.prod(passes[:i]) * ends[i], 1.0) for i in range(len(draft) + 1)]


def block_lengths(p, q, draft):
    passes = [1.0, *block_passes(p, q, draft)]
    longer = [math.prod(1 - chance for chance in passes[i + 1 :]) for i in range(len(passes))]
    return [(a * b, w) for a, b, w in zip(passes, longer, weights_of(p, q, draft), strict=True)]


def next_law(p, q, draft, accepted, weight):
    """Return the unnormalised law of the token after the accepted ones."""
    return p[accepted] if accepted == len(draft) else residual(p[accepted], q[accepted], weight)


class Case:
    """Rows: every draft of a tiny vocabulary with every table of random logits; p and q are fp64."""

    def __init__(self, tables, temperature=1.0, **restriction):
        generator = torch.Generator().manual_seed(7)
        p = torch.randn(tables, STEPS + 1, VOCAB, generator=generator) * 1.5
        q = p[:, :STEPS] * 0.5 + torch.randn(tables, STEPS, VOCAB, generator=generator)
        self.rows = [(table, draft) for table in range(tables) for draft in DRAFTS + ENDED]
        which = torch.tensor([table for table, _ in self.rows])
        self.p_logits, self.q_logits = p[which], q[which]
        self.tokens = torch.tensor([draft for _, draft in self.rows])
        self.p, self.q = law(p, temperature, **restriction)[which].tolist(), law(q, 1.0)[which].tolist()
        self.drafts = [[t for t in draft if t >= 0] for _, draft in self.rows]
        self.seeds, self.first = torch.arange(len(which)) + 1000, torch.full((len(which),), FIRST)

    def run(self, op, accept_seeds, device="cpu"):
        """Return the op's output for the logits of these laws."""
        ones = torch.ones(len(self.rows))
        arguments = self.p_logits, self.tokens, self.q_logits, ones, self.seeds, accept_seeds, self.first
        return op(*(x.to(device) for x in VerifyArguments(*arguments)))

    def check(self, output, oracle, accept_seeds, margin=1e-5):
        """Compare with the oracle for these seeds, except choices closer than the margin, which may be at most 2 %."""
        found = list(zip(*(x.tolist() for x in output), strict=True))
        positions = self.first[:, None] + torch.arange(STEPS + 1)
        uniforms = noise.uniform(noise.key(accept_seeds[:, None], positions, noise.ACCEPT), positions * 0).tolist()
        keys = noise.key(self.seeds[:, None], positions, noise.TARGET)
        gumbel = noise.gumbel(keys[..., None], torch.arange(VOCAB)).tolist()
        close = 0
        for row, (p, q, draft) in enumerate(zip(self.p, self.q, self.drafts, strict=True)):
            (accepted, weight), near = oracle(p, q, draft, uniforms[row]), set()
            for factor in (1 - margin, 1 + margin):
                near.add(oracle(p, q, draft, [u * factor for u in uniforms[row]])[0])
            wanted = next_law(p, q, draft, accepted, weight)
            scores = [math.log(x) + g if x else -math.inf for x, g in zip(wanted, gumbel[row][accepted], strict=True)]
            best, second = sorted(scores)[:-3:-1]
            if len(near) > 1 or best - second < 1e-4:
                close += 1
                continue
            assert found[row] == (accepted, scores.index(best)), (row, self.rows[row])
        assert close <= len(found) // 50
