"""A product of random numbers on a GPU, whose tilings are timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class RandomProduct:
    """A product of this many rows with a weight [n, k]; gated: n stacks gate above up."""

    rows: int
    n: int
    k: int
    gated: bool

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random rows and a weight, bfloat16."""
        x, weight = (torch.randn(size, self.k, dtype=torch.bfloat16, device=DEVICE) for size in (self.rows, self.n))
        return x, weight * self.k**-0.5

    def describe(self) -> str:
        """Return its sizes, in words."""
        return f"{self.rows} x {self.k} to {self.n}{' gated' * self.gated}"
