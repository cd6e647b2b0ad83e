"""What a verifier's output follows from, in fp64 and plain Python: both laws, the uniforms and the Gumbel noise."""

import itertools
import math

import torch

from spec_decode.sampling import noise
from spec_decode.verification.kernels.verify_arguments import VerifyArguments

VOCAB, STEPS, FIRST = 3, 3, 30
DRAFTS = list(itertools.product(range(VOCAB), repeat=STEPS))
ENDED = [(1, -1, -1), (2, 0, -1), (-1, -1, -1)]


def rejection_passes(p, q, draft):
    """For each prefix: whether all before it must pass too, and the probability that it passes."""
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


class Case:
    """Rows: every draft of a tiny vocabulary with every table of random logits; p and q are fp64."""

    def __init__(self, tables):
        generator = torch.Generator().manual_seed(7)
        p = torch.randn(tables, STEPS + 1, VOCAB, generator=generator) * 1.5
        q = p[:, :STEPS] * 0.5 + torch.randn(tables, STEPS, VOCAB, generator=generator)
        self.rows = [(table, draft) for table in range(tables) for draft in DRAFTS + ENDED]
        which = torch.tensor([table for table, _ in self.rows])
        self.p_logits, self.q_logits = p[which], q[which]
        self.tokens = torch.tensor([draft for _, draft in self.rows])
        self.p, self.q = (x.double().softmax(-1).tolist() for x in (self.p_logits, self.q_logits))
        self.drafts = [[t for t in draft if t >= 0] for _, draft in self.rows]

    def check(self, op, oracle, accept_seeds, device, margin):
        """The op's output for these seeds is the oracle's, but for choices closer than the margin: at most 2 %."""
        count = len(self.rows)
        seeds, first = torch.arange(count) + 1000, torch.full((count,), FIRST)
        arguments = VerifyArguments(
            self.p_logits, self.tokens, self.q_logits, torch.ones(count), seeds, accept_seeds, first
        )
        found = [x.tolist() for x in op(*(x.to(device) for x in arguments))]
        positions = first[:, None] + torch.arange(STEPS + 1)
        uniforms = noise.uniform(noise.key(accept_seeds[:, None], positions, noise.ACCEPT), positions * 0).tolist()
        keys = noise.key(seeds[:, None], positions, noise.TARGET)
        gumbel = noise.gumbel(keys[..., None], torch.arange(VOCAB)).tolist()
        close = 0
        for row in range(count):
            p, q, draft = self.p[row], self.q[row], self.drafts[row]
            (accepted, weight), near = oracle(p, q, draft, uniforms[row]), set()
            for factor in (1 - margin, 1 + margin):
                near.add(oracle(p, q, draft, [u * factor for u in uniforms[row]])[0])
            law = p[accepted] if accepted == len(draft) else residual(p[accepted], q[accepted], weight)
            scores = [math.log(x) + g if x else -math.inf for x, g in zip(law, gumbel[row][accepted], strict=True)]
            best, second = sorted(scores)[:-3:-1]
            if len(near) > 1 or best - second < 1e-4:
                close += 1
                continue
            assert (found[0][row], found[1][row]) == (accepted, scores.index(best)), (row, self.rows[row])
        assert close <= count // 50
