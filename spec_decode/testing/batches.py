"""Batch shapes that checks and tests run on, and specs for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from builders import AttentionSpec
from builders.spec import MAX_TREE_TOKENS

MAX_SEQ_LEN = 160
"""Token limit of the checks' requests: enough for several pages, splits and windows, quick in an interpreter."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Query and sequence lengths of each live request, and the padded number of rows."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    rows: int
    trees: tuple[tuple[int, ...], ...] = ()
    """Of each request, the query token that each but the first follows; empty where queries are chains."""

    @property
    def uniform(self) -> bool:
        return len(set(self.query_lens)) == 1

    @property
    def num_tokens(self) -> int:
        """Query tokens, those of padding rows included. Only a uniform batch has padding tokens."""
        padding = self.query_lens[0] * (self.rows - len(self.query_lens)) if self.uniform else 0
        return sum(self.query_lens) + padding

    def paths(self, request: int) -> list[tuple[int, ...]]:
        """The query tokens that lead to each query token of a tree, itself included."""
        found: list[tuple[int, ...]] = [(0,)]
        for token, parent in enumerate(self.trees[request], 1):
            found.append((*found[parent], token))
        return found

    def tree_masks(self) -> list[int]:
        """Of every query token, padding included, the mask that AttentionBatch has."""
        paths = [path for request in range(len(self.trees)) for path in self.paths(request)]
        words = [sum(1 << token for token in path) for path in paths]
        signed = [word - (1 << 64) if word >> 63 else word for word in words]
        return signed + [0] * (self.num_tokens - len(signed))


@dataclass(frozen=True, slots=True)
class Case:
    """A spec with a batch shape."""

    spec: AttentionSpec
    batch: Batch
    pool: int = 0
    """Pages of the cache, if more than the batch needs."""

    @property
    def max_seq_len(self) -> int:
        """Tokens that a request may have: as many as in other cases, or as the longest has here."""
        return max(MAX_SEQ_LEN, *self.batch.seq_lens)


DECODE = Batch((1, 1, 1, 1, 1), (1, 15, 16, 126, 142), 7)
"""One token each, before page edges and the 128 tokens that some kernels split at, with two padding rows."""
SINGLE = Batch((1,), (33,), 1)
VERIFY = Batch((5, 5, 5), (5, 37, 150), 4)
"""A uniform 1 + K, as in step 0 and in verification."""
RAGGED = Batch((3, 1, 20, 7), (3, 64, 20, 100), 4)
"""A prefill beside decodes."""


def with_trees(spec: AttentionSpec) -> AttentionSpec:
    """The spec with trees; a window becomes the narrowest that one lies in."""
    return replace(spec, tree=True, sliding_window=None if spec.sliding_window is None else MAX_TREE_TOKENS)
