"""What changes rows' logits before the temperature: biases of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_BIASES = 1024
"""The most biases of a row."""


class Bias(NamedTuple):
    """`value` is added to the token's logit before position `end` in prompt and text; -inf forbids the token."""

    token: int
    value: float
    end: int


class LogitEdits(NamedTuple):
    """The edits of R rows on the device, at fixed addresses, since captured verification reads them.

    - num_biases   int32 [R]; 0 for a row without biases, and for padding
    - bias_tokens  int32 [R, MAX_BIASES]; of each row only its num_biases first are read, like those of the next two
    - biases       fp32 [R, MAX_BIASES], the values
    - bias_ends    int64 [R, MAX_BIASES]
    """

    num_biases: torch.Tensor
    bias_tokens: torch.Tensor
    biases: torch.Tensor
    bias_ends: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, device: torch.device | str) -> LogitEdits:
        """Allocate persistent rows, all padding until load()."""
        return cls(
            num_biases=torch.zeros(max_reqs, dtype=torch.int32, device=device),
            bias_tokens=torch.zeros(max_reqs, MAX_BIASES, dtype=torch.int32, device=device),
            biases=torch.zeros(max_reqs, MAX_BIASES, dtype=torch.float32, device=device),
            bias_ends=torch.zeros(max_reqs, MAX_BIASES, dtype=torch.int64, device=device),
        )

    def load(self, rows: Sequence[Sequence[Bias]]) -> None:
        """Write the first rows' biases and make the others padding, in place; host work, not for a graph."""
        counts = [len(biases) for biases in rows]
        self.num_biases[: len(rows)] = torch.tensor(counts, dtype=torch.int32)
        self.num_biases[len(rows) :].fill_(0)
        for row, biases in enumerate(rows):
            for at, tensor in enumerate((self.bias_tokens, self.biases, self.bias_ends) if biases else ()):
                tensor[row, : len(biases)] = torch.tensor([bias[at] for bias in biases], dtype=tensor.dtype)

    def head(self, rows: int) -> LogitEdits:
        """Return views of the first rows."""
        return LogitEdits(*(tensor[:rows] for tensor in self))

    def tail(self, first: int) -> LogitEdits:
        """Return views of the rows from `first` on."""
        return LogitEdits(*(tensor[first:] for tensor in self))
