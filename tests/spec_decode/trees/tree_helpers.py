"""Many draft trees, drawn from tables of logits, and their verification."""

from dataclasses import dataclass

import torch

from spec_decode.graphs.emulator import EmulatedRuntime
from spec_decode.trees import DraftTree, TreeBatch
from spec_decode.verification import TreeSampling
from tests.spec_decode.verification.verify_helpers import FIRST, sampling_of

TREES = {
    "three roots' children": DraftTree.from_paths([(0,), (1,), (2,)]),
    "a chain": DraftTree.chain(3),
    "two levels": DraftTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)]),
    "wide and deep": DraftTree.from_paths(
        [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (0, 0, 0), (0, 0, 1)]
    ),
}


class Tables:
    """Logits fp32 [depth, last token, V] of both models; the draft's are the target's, blurred with noise."""

    def __init__(self, vocab, depth, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.p = torch.randn(depth + 1, vocab, vocab, generator=generator) * 1.5
        noise = torch.randn(depth, vocab, vocab, generator=generator) * 1.5
        self.q = 0.5 * (self.p[:depth] + noise)


class TableGrowth:
    """A tree of R rows, made by a subclass, grown by a draft whose logits [K, R, last token, V] are a table."""

    def __init__(self, rows, vocab, steps, seed=0):
        self.table = torch.randn(steps, rows, vocab, vocab, generator=torch.Generator().manual_seed(seed))
        self.step, self.steps, self.row = torch.zeros(1, dtype=torch.int64), steps, torch.arange(rows)[:, None]

    def logits(self):
        step = int(self.step)
        return self.table[step, self.row, self.tree.frontier_tokens if step else torch.zeros_like(self.row)]

    def run(self, steps=None):
        for step in range(self.steps if steps is None else steps):
            self.step.fill_(step)
            self.tree.grow(self.logits())
        return self

    def replayed(self):
        """As run, with one graph for the root's step and one for the later steps."""
        runtime, (rows, vocab) = EmulatedRuntime(), (len(self.row), self.table.shape[-1])
        logits = {places: torch.zeros(rows, places, vocab) for places in (1, self.tree.width)}
        graphs = {places: runtime.capture(lambda own=own: self.tree.grow(own)) for places, own in logits.items()}
        for step in range(self.steps):
            self.step.fill_(step)
            found = self.logits()
            logits[found.shape[1]].copy_(found)
            graphs[found.shape[1]].replay()
        return self


@dataclass
class Drafted:
    """Trees of R rows whose root is token 0: tokens int64 [R, 1 + N], the target's logits fp32 [R, 1 + N, V]."""

    tree: DraftTree
    tokens: torch.Tensor
    p_logits: torch.Tensor

    @property
    def batch(self):
        return TreeBatch(self.tokens[:, 1:].contiguous(), self.tree.rows(len(self.tokens), "cpu"))


def draft(tables, tree, rows, *, seed=0, temperature=1.0):
    """Draw each token's children without replacement: the largest of logits with Gumbel noise, in order."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(rows, 1 + tree.num_tokens, dtype=torch.int64)
    for token, depth in enumerate(tree.depths):
        children = [1 + i for i, parent in enumerate(tree.parents) if parent == token]
        if children:
            q_logits = tables.q[depth][tokens[:, token]] / temperature
            gumbel = -torch.empty(rows, tables.vocab).exponential_(generator=generator).log()
            tokens[:, children] = (q_logits + gumbel).topk(len(children)).indices
    p_logits = torch.stack([tables.p[depth][tokens[:, token]] for token, depth in enumerate(tree.depths)], 1)
    return Drafted(tree, tokens, p_logits)


def verify(drafted, **sampling):
    """Return TreeSampling's output."""
    rows = len(drafted.tokens)
    place = {"sampling": sampling_of(rows, **sampling), "draft_positions": torch.full((rows,), FIRST)}
    return TreeSampling(drafted.tree.max_depth).verify(drafted.p_logits, drafted.batch, **place)
