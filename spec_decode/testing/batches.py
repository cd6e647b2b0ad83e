"""Batch shapes that checks and tests run on, and specs for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from builders import AttentionSpec
from builders.spec import MAX_TREE_TOKENS

MAX_SEQ_LEN = 160
"""Token limit of the checks' requests: covers several pages, splits and windows, yet quick in an interpreter."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Query and sequence lengths of each live request, and the padded number of rows."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    rows: int
    trees: tuple[tuple[int, ...], ...] = ()
    """Per request, the parent of each query token but the first; empty if queries are chains."""
    tail: int = 0
    """Padding tokens behind the last row; only if the batch is not uniform."""

    @property
    def uniform(self) -> bool:
        return len(set(self.query_lens)) == 1

    @property
    def num_tokens(self) -> int:
        """Query tokens, including padding: that of padding rows if the batch is uniform, else the tail."""
        padding = self.query_lens[0] * (self.rows - len(self.query_lens)) if self.uniform else self.tail
        return sum(self.query_lens) + padding

    def paths(self, request: int) -> list[tuple[int, ...]]:
        """Return the path to each query token of a tree, including the token."""
        found: list[tuple[int, ...]] = [(0,)]
        for token, parent in enumerate(self.trees[request], 1):
            found.append((*found[parent], token))
        return found

    def tree_masks(self) -> list[int]:
        """Return the AttentionBatch mask of every query token, including padding."""
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
    limit: int = MAX_SEQ_LEN
    """Token limit of a request, unless the longest request here is longer."""
    width: int = 1
    """How many times the block table is as wide as the limit needs."""
    sick: int | None = None
    """A request whose cached keys and values, and query, are not finite."""
    other: Batch | None = None
    """Another batch with the same rows, to which a graph can be replayed."""

    @property
    def max_seq_len(self) -> int:
        """Token limit of a request: the limit, or the longest request here if that is longer."""
        return max(self.limit, *self.batch.seq_lens)


DECODE = Batch((1, 1, 1, 1, 1), (1, 15, 16, 126, 142), 7)
"""One token each, just before page edges and the 128 tokens at which some kernels split, with two padding rows."""
SINGLE = Batch((1,), (33,), 1)
VERIFY = Batch((5, 5, 5), (5, 37, 150), 4)
"""A uniform 1 + K, as in step 0 and in verification."""
RAGGED = Batch((3, 1, 20, 7), (3, 64, 20, 100), 4)
"""A prefill next to decodes."""


def with_trees(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec with trees; a window is replaced by the narrowest that holds a tree."""
    return replace(spec, tree=True, sliding_window=None if spec.sliding_window is None else MAX_TREE_TOKENS)
