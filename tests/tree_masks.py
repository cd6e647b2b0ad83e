"""Trees of three requests, as masks of their query tokens."""

import torch

TREE_LENS = [5, 64, 3]
"""Query tokens of each request."""


def tree_masks() -> torch.Tensor:
    """Return int64 [72]: trees of any shape, one that uses all 64 mask bits, one that ends before its tokens do."""
    bushy = [sum(1 << at for at in path) for path in ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4))]
    wide = [1 | 1 << token | 1 << token // 2 for token in range(63)] + [-(2**63) | 1]
    return torch.tensor([*bushy, *wide, 1, 0, 0])
