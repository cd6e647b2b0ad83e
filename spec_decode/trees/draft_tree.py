"""The static shape of a tree of draft tokens, and the trees of a batch as tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from builders.errors import require, require_counts, require_tensor
from builders.spec import MAX_TREE_TOKENS


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of draft tokens, as the query tokens of the target's forward.

    Query token 0 is the root, the last verified token; query token 1 + i is draft token i.

    - parents  for draft token i, the query token that it follows: 0 for the root, 1 + j for draft token j

    Raises BatchError for a parent that does not exist or does not precede its child, and for more than MAX_TREE_TOKENS
    query tokens.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        require(
            isinstance(self.parents, Sequence) and not isinstance(self.parents, str),
            f"a tree's parents must be a tuple of ints, got {self.parents!r}. Pass DraftTree.chain(K) for one path.",
        )
        # Copy: the caller can change a list afterwards.
        object.__setattr__(self, "parents", tuple(self.parents))
        wrong = next((i for i, parent in enumerate(self.parents) if not _is_before(parent, i)), None)
        require(
            wrong is None,
            f"the parent of draft token i must be 0, the root, or 1 + an earlier draft token, so 0 to i, got "
            f"{self.parents[wrong or 0] if self.parents else None!r} for draft token {wrong}. List parents before "
            "their children.",
        )
        require_tree_size(len(self.parents))

    @classmethod
    def chain(cls, num_speculative_tokens: int) -> DraftTree:
        """Make a tree of one path."""
        return cls(tuple(range(num_speculative_tokens)))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> DraftTree:
        """Make the tree of these paths, in any order. A path lists the ranks of its tokens, 0 for the most probable:
        (0, 2) is the third most probable token after the most probable one. Draft tokens are numbered by depth, then by
        path.

        Raises BatchError for a path that is empty or listed twice, for one with a missing parent or more probable
        sibling, and as the class does.
        """
        listed = list(paths) if isinstance(paths, Iterable) else [paths]
        for path in listed:
            require(
                isinstance(path, Sequence) and all(type(choice) is int for choice in path),
                f"a tree's paths must be sequences of ints, the ranks of their tokens, got {path!r}. Pass, for "
                "example, [(0,), (0, 0), (1,)].",
            )
        ordered = sorted((tuple(path) for path in listed), key=lambda path: (len(path), path))
        known: dict[tuple[int, ...], int] = {(): 0}
        for path in ordered:
            _require_path(path, known)
            known[path] = len(known)
        return cls(tuple(known[path[:-1]] for path in ordered))

    @property
    def num_tokens(self) -> int:
        """Number of draft tokens."""
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """For each query token, its distance from the root: 0 for the root, 1 for the tokens after it."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return tuple(found)

    @property
    def ranks(self) -> tuple[int, ...]:
        """For each draft token, its index among its parent's children."""
        return tuple(self.parents[:i].count(parent) for i, parent in enumerate(self.parents))

    @property
    def max_depth(self) -> int:
        """The most draft tokens that can be accepted, which is the number of draft steps."""
        return max(self.depths)

    @property
    def max_children(self) -> int:
        """The most draft tokens that follow one query token."""
        return max(self.parents.count(token) for token in set(self.parents))

    @property
    def width(self) -> int:
        """The most tokens with children at one depth. A draft step drafts from these."""
        return max(Counter(self.depths[token] for token in set(self.parents)).values())

    def by_depth(self) -> DraftTree:
        """Return the same tree with its draft tokens numbered by depth. Tokens of one depth keep their order."""
        order = sorted(range(1 + self.num_tokens), key=self.depths.__getitem__)
        new = {token: at for at, token in enumerate(order)}
        return DraftTree(tuple(new[self.parents[token - 1]] for token in order[1:]))

    def require_depth(self, num_speculative_tokens: int) -> None:
        """Raise BatchError for a tree that is deeper than the number of draft steps."""
        require(
            self.max_depth <= num_speculative_tokens,
            f"a tree must be at most {num_speculative_tokens} deep, the draft's steps, got a path of {self.max_depth} "
            "tokens; its last tokens would never be drafted. Shorten it, or draft more steps.",
        )

    def require_steps(self, num_speculative_tokens: int) -> None:
        """Raise BatchError for a tree that is deeper than the number of draft steps."""
        self.require_depth(num_speculative_tokens)

    def require_frontiers(self, num_speculative_tokens: int) -> None:
        """Raise BatchError unless a draft that runs over all frontiers can hold them in its masks."""
        require_frontiers(self.width, num_speculative_tokens)

    def rows(self, num_reqs: int, device: torch.device | str) -> torch.Tensor:
        """Return the parents for every request, int64 [num_reqs, N]."""
        return torch.tensor(self.parents, dtype=torch.int64, device=device).repeat(num_reqs, 1)


def require_tree_size(num_tokens: int, got: str = "") -> None:
    """Raise BatchError unless a tree can have this many draft tokens. got: what the message reports instead."""
    require_counts("a tree's draft tokens", (num_tokens,))
    require(
        1 <= num_tokens < MAX_TREE_TOKENS,
        f"a tree must have 1 to {MAX_TREE_TOKENS - 1} draft tokens, got {got or num_tokens}; a token's ancestors are "
        "the bits of one word. Leave out the least probable paths.",
    )


def require_frontiers(width: int, num_speculative_tokens: int) -> None:
    """Raise BatchError unless a mask can hold all frontiers of `width` tokens that a draft runs over."""
    steps = num_speculative_tokens - 1
    require(
        width * steps <= MAX_TREE_TOKENS,
        f"the frontiers of a tree must have at most {MAX_TREE_TOKENS} tokens together, got {width} at each of {steps} "
        "steps; a token's ancestors are the bits of one word. Draft fewer steps, or let fewer tokens have children.",
    )


def _is_before(parent: object, token: int) -> bool:
    return type(parent) is int and 0 <= parent <= token


def _require_path(path: tuple[int, ...], known: dict[tuple[int, ...], int]) -> None:
    require(
        all(choice >= 0 for choice in path) and bool(path),
        f"a tree's paths must have one or more ranks of 0 or more, got {path}. The root is implied: leave it out.",
    )
    require(path not in known, f"a tree must list each path once; {path} is repeated. Leave one out.")
    parent, rank = path[:-1], path[-1]
    needed = [parent] if rank == 0 else [parent, (*parent, rank - 1)]
    missing = [before for before in needed if before not in known]
    require(
        not missing,
        f"a tree must list a path's parent and its more probable siblings; {path} lacks {missing[:1]}. Add it.",
    )


class TreeBatch(NamedTuple):
    """The trees of R requests, each with up to N draft tokens.

    - draft_tokens  int64 [R, N]
    - parents       int64 [R, N], as in DraftTree; the first invalid value ends the row's tree
    """

    draft_tokens: torch.Tensor
    parents: torch.Tensor

    def checked(self, target_logits: torch.Tensor) -> TreeBatch:
        """Return the tensors, contiguous. Raises BatchError for tensors or target_logits of the wrong shape, dtype or
        device, and for more tokens than a tree can have."""
        drafts, device = self.draft_tokens, target_logits.device
        require_tensor("draft_tokens", drafts, shape=(None, None), dtype=torch.int64, device=device)
        rows, tokens = drafts.shape
        require_tensor("parents", self.parents, shape=(rows, tokens), dtype=torch.int64, device=device)
        shape, dtype = (rows, 1 + tokens, None), target_logits.dtype
        require_tensor("target_logits", target_logits, shape=shape, dtype=dtype, device=device)
        require_tree_size(tokens, f"room for {tokens}")
        return TreeBatch(self.draft_tokens.contiguous(), self.parents.contiguous())


class PlacedTree:
    """Assembles the trees of R requests, all in the shape of a DraftTree, from the drafted tokens."""

    def __init__(self, tree: DraftTree, sources: Sequence[int], rows: int, device: torch.device) -> None:
        """tree: numbered by depth, so cutting it off at a depth leaves its first tokens. sources: for each draft token,
        its place among the drafted ones."""
        self._sources = torch.tensor(sources, device=device)
        self._depths = torch.tensor(tree.depths[1:], device=device)
        self._parents = tree.rows(rows, device)

    def rows(self, drafted: torch.Tensor, depths: torch.Tensor | None) -> TreeBatch:
        """Return the trees of the first rows, from drafted int64 [rows, places]; depths: int [rows], the depth to cut
        each tree at; None keeps whole trees."""
        tokens, parents = drafted[:, self._sources], self._parents[: len(drafted)]
        if depths is None:
            return TreeBatch(tokens, parents)
        beyond = self._depths > depths[:, None]
        return TreeBatch(tokens.masked_fill(beyond, -1), parents.masked_fill(beyond, -1))
