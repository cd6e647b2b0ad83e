"""Many drafts and verified rows, for the tests of the verifiers."""

import math

import numpy as np
import torch
from scipy import stats

from spec_decode.sampling import DraftSampler, Sampling
from spec_decode.sampling.logit_edits import LogitEdits, Penalties, RowEdits
from spec_decode.sampling.target_sampler import sample_target

COUNT = 50_000
FIRST = 30
"""Absolute position of draft token 0."""


def peaked(tokens, vocab=8):
    """Return logits [R, 1 + K, V] whose argmax are these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float() * 9


def sampling_of(rows, temperature=0.0, *, top_k=0, top_p=1.0, min_p=0.0, seeds=None, edits=None):
    """Return the same parameters for every row; seeds are row indices by default."""
    return Sampling(
        temperature=torch.full((rows,), temperature), top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p), min_log_p=torch.full((rows,), min_p).log(),
        seeds=torch.arange(rows) if seeds is None else seeds, edits=edits,
    )  # fmt: skip


def verified(verifier, target_logits, draft_tokens, *, draft_logits=None, first=FIRST, **sampling):
    draft_tokens = torch.as_tensor(draft_tokens)
    rows, columns = draft_tokens.shape
    if draft_logits is None:
        draft_logits = torch.zeros(rows, columns, target_logits.shape[-1])
    return verifier.verify(
        target_logits, draft_tokens, draft_logits, sampling=sampling_of(rows, **sampling),
        draft_positions=torch.as_tensor(first).expand(rows),
    )  # fmt: skip


def draft_of(logits, temperature, position, seeds=None):
    """Draw one draft token per row, as the drafter draws the token at that absolute position."""
    rows, vocab = logits.shape
    sampler = DraftSampler(
        torch.ones(rows, dtype=torch.int32), torch.as_tensor(position).expand(rows) - 2, torch.tensor([0]),
        num_speculative_tokens=1, vocab_size=vocab,
    )  # fmt: skip
    sampler.temperature.fill_(temperature)
    sampler.seeds.copy_(torch.arange(rows) if seeds is None else seeds)
    sampler(logits)
    return sampler.draft_tokens[:, 0]


def edits_of(rows, count):
    """Return the edits of `count` rows, which repeat these."""
    edits = LogitEdits.allocate(len(rows), 5, "cpu")
    edits.load(rows)
    return LogitEdits(*(tensor.expand(count, *tensor.shape[1:]) for tensor in edits))


class Edit:
    """Edits of every row, and the text before: see two_tokens."""

    def __init__(self, *biases, prompt=(), output=(), **penalties):
        self._row = RowEdits(biases, Penalties(**penalties), prompt, output)

    def _after(self, texts):
        """Return a row after each text, with narrow tables."""
        edits = LogitEdits.allocate(len(texts), 5, "cpu")
        edits.load([self._row._replace(output=[*self._row.output, *text]) for text in texts])
        return LogitEdits(*(tensor[..., :5] for tensor in edits))

    def rows(self, count):
        return LogitEdits(*(tensor.expand(count, *tensor.shape[1:]) for tensor in self._after([()])))

    def rows_after(self, first):
        return LogitEdits(*(tensor[first] for tensor in self._after([(token,) for token in range(5)])))

    def of(self, logits, text):
        """Return the logits after a text, changed one by one."""
        changed, output = logits.tolist(), [*self._row.output, *text]
        for token, value, end in self._row.biases:
            changed[token] += value if FIRST + len(text) < end else 0.0
        repetition, presence, frequency = self._row.penalties
        for token in {*output, *self._row.prompt}:
            changed[token] *= 1 / repetition if changed[token] > 0 else repetition
        for token in output:
            changed[token] -= frequency + presence / output.count(token)
        return torch.tensor(changed)


def law(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Return the distribution, fp64 in logits' shape, from which rows of logits are sampled; in plain Python."""
    rows = logits.double().reshape(-1, logits.shape[-1]).tolist()
    shares = [_row_law(row, temperature, top_k, top_p, min_p) for row in rows]
    return torch.tensor(shares, dtype=torch.float64).view_as(logits)


def _row_law(row, temperature, top_k, top_p, min_p):
    kth = sorted(row)[-top_k] if 0 < top_k <= len(row) else min(row)
    kept = kth = min(x for x in row if x >= kth and math.exp((x - max(row)) / temperature) >= min_p)

    def weight(least):
        return sum(math.exp((x - max(row)) / temperature) for x in row if x >= least)

    if top_p < 1:
        kept = max(x for x in row if x >= kth and weight(x) >= top_p * weight(kth))
    return [math.exp((x - max(row)) / temperature) / weight(kept) if x >= kept else 0.0 for x in row]


def two_tokens(
    verifier, temperature, likeness, seed, *, vocab=5, draft_vocab=None, count=COUNT, edit=None, **restriction
):
    """Return the first two output tokens of `count` requests, K = 2, as one index, their expected law, and the output.

    draft_vocab: how many tokens the draft can propose. restriction: the target's top_k, top_p and min_p. edit: of the
    target's logits.
    The draft's logits are the target's, blurred with noise: with likeness 0 the draft knows nothing of the target.
    """
    generator = torch.Generator().manual_seed(seed)
    p = [torch.randn(*shape, generator=generator) * 1.5 for shape in ((vocab,), (vocab, vocab))]
    q = [likeness * x + (1 - likeness) * 1.5 * torch.randn(x.shape, generator=generator) for x in p]
    q = [x.masked_fill(torch.arange(vocab) >= (draft_vocab or vocab), -math.inf) for x in q]
    after = torch.randn(vocab, vocab, vocab, generator=generator)
    d0 = draft_of(q[0].expand(count, -1), temperature, FIRST)
    d1 = draft_of(q[1][d0], temperature, FIRST + 1)
    output = verified(
        verifier, torch.stack([p[0].expand(count, -1), p[1][d0], after[d0, d1]], 1), torch.stack([d0, d1], 1),
        temperature=temperature, draft_logits=torch.stack([q[0].expand(count, -1), q[1][d0]], 1) / temperature,
        edits=edit and edit.rows(count), **restriction,
    )  # fmt: skip
    accepted, added = output.accepted, output.next_tokens
    first = torch.where(accepted > 0, d0, added)
    later = sample_target(
        p[1][first], sampling=sampling_of(count, temperature, edits=edit and edit.rows_after(first), **restriction),
        positions=torch.full((count,), FIRST + 1),
    )  # fmt: skip
    second = torch.where(accepted == 2, d1, torch.where(accepted == 1, added, later))
    if edit:
        p = [edit.of(p[0], []), torch.stack([edit.of(x, [token]) for token, x in enumerate(p[1])])]
    exact = [law(x, temperature, **restriction) for x in p]
    return first * vocab + second, exact[0][:, None] * exact[1], output


def p_value(tokens, probabilities, bins):
    """Return the p-value of these draws under the probabilities; 0 if one of them was impossible."""
    counts, law = np.bincount(tokens.numpy(), minlength=bins), np.asarray(probabilities).ravel()
    if counts[law == 0].any():
        return 0.0
    possible = law > 0
    return stats.chisquare(counts[possible], law[possible] * counts.sum()).pvalue if possible.sum() > 1 else 1.0
