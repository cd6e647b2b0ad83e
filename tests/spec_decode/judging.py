"""Drafts and verdicts in bulk, for the tests of the verifiers."""

import numpy as np
import torch
from scipy import stats

from spec_decode.ops.sample_draft import sample_draft
from spec_decode.verification import sample_target

COUNT = 100_000
FIRST = 30
"""Absolute position of draft token 0."""


def peaked(tokens, vocab=8):
    """Logits [R, 1 + K, V] whose argmax are these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float() * 9


def judged(verifier, target_logits, draft_tokens, *, temperature=0.0, draft_logits=None, first=FIRST):
    draft_tokens = torch.as_tensor(draft_tokens)
    rows, columns = draft_tokens.shape
    if draft_logits is None:
        draft_logits = torch.zeros(rows, columns, target_logits.shape[-1])
    return verifier.verify(
        target_logits, draft_tokens, draft_logits,
        temperature=torch.full((rows,), temperature), seeds=torch.arange(rows),
        first_positions=torch.as_tensor(first).expand(rows),
    )  # fmt: skip


def draft_of(logits, temperature, position, seeds=None):
    """One draft token per row, drawn as the drafter draws the token of that absolute position."""
    rows, vocab = logits.shape
    tokens = torch.zeros(rows, 1, dtype=torch.int64)
    sample_draft(
        logits, temperature=torch.full((rows,), temperature), seeds=torch.arange(rows) if seeds is None else seeds,
        positions=torch.as_tensor(position).expand(rows) - 2, seq_lens=torch.ones(rows, dtype=torch.int32),
        step=torch.zeros(1, dtype=torch.int64), draft_tokens=tokens, draft_logits=torch.zeros(rows, 1, vocab),
        next_ids=torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip
    return tokens[:, 0]


def two_tokens(verifier, vocab, temperature, likeness, seed):
    """First two output tokens of COUNT requests, K = 2, and the joint distribution they should have.

    The draft's logits are the target's, blurred with noise: likeness 0 is a draft that knows nothing of the target.
    """
    generator = torch.Generator().manual_seed(seed)
    p = [torch.randn(*shape, generator=generator) * 1.5 for shape in ((vocab,), (vocab, vocab))]
    q = [likeness * x + (1 - likeness) * 1.5 * torch.randn(x.shape, generator=generator) for x in p]
    after = torch.randn(vocab, vocab, vocab, generator=generator)
    d0 = draft_of(q[0].expand(COUNT, -1), temperature, FIRST)
    d1 = draft_of(q[1][d0], temperature, FIRST + 1)
    verdict = judged(
        verifier, torch.stack([p[0].expand(COUNT, -1), p[1][d0], after[d0, d1]], 1), torch.stack([d0, d1], 1),
        temperature=temperature, draft_logits=torch.stack([q[0].expand(COUNT, -1), q[1][d0]], 1) / temperature,
    )  # fmt: skip
    accepted, added = verdict.accepted, verdict.next_tokens
    first = torch.where(accepted > 0, d0, added)
    later = sample_target(
        p[1][first], temperature=torch.full((COUNT,), temperature), seeds=torch.arange(COUNT),
        positions=torch.full((COUNT,), FIRST + 1),
    )  # fmt: skip
    second = torch.where(accepted == 2, d1, torch.where(accepted == 1, added, later))
    exact = [(x.double() / temperature).softmax(-1) for x in (*p, after)]
    return first, second, verdict, (d0, d1), exact


def p_value(tokens, probabilities, bins):
    counts = np.bincount(tokens.numpy(), minlength=bins)
    return stats.chisquare(counts, np.asarray(probabilities).ravel() * counts.sum()).pvalue
