"""What changes rows' logits before the temperature: biases of single tokens, then penalties for tokens of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from builders.devices import stage_into

MAX_BIASES = 1024
"""The most biases of a row."""


class Bias(NamedTuple):
    """`value` is added to the token's logit before position `end` in prompt and text; -inf forbids the token."""

    token: int
    value: float
    end: int


class Penalties(NamedTuple):
    """repetition divides a positive logit of a token in the prompt or the output, and multiplies a negative one. Then
    frequency is subtracted for each time that the token is in the output, and presence once if it is."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


class RowEdits(NamedTuple):
    """The edits of a row, and its text so far."""

    biases: Sequence[Bias]
    penalties: Penalties
    prompt: Sequence[int]
    output: Sequence[int]


class LogitEdits(NamedTuple):
    """The edits of R rows on the device, at fixed addresses, since captured verification reads them.

    - num_biases   int32 [R]; 0 for a row without biases, and for padding
    - bias_tokens  int32 [R, MAX_BIASES]; of each row only its num_biases first are read, like those of the next two
    - biases       fp32 [R, MAX_BIASES], the values
    - bias_ends    int64 [R, MAX_BIASES]
    - penalties    fp32 [R, 3], in the order of Penalties
    - counts       int32 [R, V], only of rows with penalties: twice how often the output has the token, and 1 more if
                   the prompt has it
    """

    num_biases: torch.Tensor
    bias_tokens: torch.Tensor
    biases: torch.Tensor
    bias_ends: torch.Tensor
    penalties: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, vocab_size: int, device: torch.device | str) -> LogitEdits:
        """Allocate persistent rows, all padding until load()."""
        edits = cls(
            num_biases=torch.zeros(max_reqs, dtype=torch.int32, device=device),
            bias_tokens=torch.zeros(max_reqs, MAX_BIASES, dtype=torch.int32, device=device),
            biases=torch.zeros(max_reqs, MAX_BIASES, dtype=torch.float32, device=device),
            bias_ends=torch.zeros(max_reqs, MAX_BIASES, dtype=torch.int64, device=device),
            penalties=torch.empty(max_reqs, len(Penalties()), dtype=torch.float32, device=device),
            counts=torch.zeros(max_reqs, vocab_size, dtype=torch.int32, device=device),
        )
        edits.load(())
        return edits

    def load(self, rows: Sequence[RowEdits]) -> None:
        """Write the first rows and make the others padding, in place; host work, not for a graph."""
        vocab = self.counts.shape[1]
        self.num_biases.fill_(0)
        for column, neutral in zip(self.penalties.unbind(1), Penalties(), strict=True):
            column.fill_(neutral)
        for row, (biases, penalties, prompt, output) in enumerate(rows):
            self.num_biases[row] = len(biases)
            for at, tensor in enumerate((self.bias_tokens, self.biases, self.bias_ends) if biases else ()):
                stage_into(tensor[row, : len(biases)], [bias[at] for bias in biases])
            if penalties != Penalties():
                stage_into(self.penalties[row], penalties)
                in_prompt, times = (
                    torch.tensor(tokens, dtype=torch.int64).bincount(minlength=vocab) for tokens in (prompt, output)
                )
                stage_into(self.counts[row], 2 * times + (in_prompt > 0))

    def head(self, rows: int) -> LogitEdits:
        """Return views of the first rows."""
        return LogitEdits(*(tensor[:rows] for tensor in self))

    def tail(self, first: int) -> LogitEdits:
        """Return views of the rows from `first` on."""
        return LogitEdits(*(tensor[first:] for tensor in self))
