"""A recurrence over integers in place of a layer's kernels, so that a state is right or wrong, with no tolerance.

A recurrent layer keeps two things in a slot: a state, and a window of the last inputs of its convolution. Here a token
maps a state to another integer, in an order that matters; a window holds the tokens themselves. A step that starts from
a wrong slot, column or count differs from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

WINDOW = 3
"""Tokens in a window: those of a convolution of width 4."""
_LOST = -1
"""What slots hold before anything is written; no sequence of tokens leads there."""
_FACTOR, _MODULUS = 1_000_003, (1 << 61) - 1


def after(state: int, token: int) -> int:
    """Return the state after another token. 0 is the state of an empty sequence."""
    return (state * _FACTOR + token + 1) % _MODULUS


def sequential(tokens: Sequence[int]) -> tuple[int, list[int]]:
    """Return the state and the window after these tokens, from an empty sequence."""
    return reduce(after, tokens, 0), [*[0] * WINDOW, *tokens][-WINDOW:]


class Slots:
    """The states and windows of one layer, which stand-ins for kernels read and write at an engine's indices.

    states: int64 [slots]. windows: int64 [slots, WINDOW + drafts]; a window starts at column 0, after drafts at the
    number of those accepted. A token without a column is not written. null: the highest index that belongs to no
    request; kernels skip rows with it or a lower one. Below, slots are int [rows], or [rows, 1 + drafts] with a slot
    for each number of accepted drafts; row r has tokens[starts[r] : starts[r + 1]].
    """

    def __init__(self, slots: int, drafts: int, null: int) -> None:
        self.states = torch.full((slots,), _LOST)
        self.windows = torch.full((slots, WINDOW + drafts), _LOST)
        self._null = null

    def written(self) -> Tensor:
        """Return a copy of all that the slots hold, int64 [slots, 1 + WINDOW + drafts]."""
        return torch.cat([self.states[:, None], self.windows], 1)

    def run(self, slots: Tensor, starts: Tensor, tokens: Sequence[int], known: Tensor | None = None) -> None:
        """Replace each row's state. known: bool [rows], whether there is one to start from; None if all rows have."""
        for row, slot, new in self._rows(slots, starts, tokens):
            state = int(self.states[slot]) if known is None or known[row] else 0
            self.states[slot] = reduce(after, new, state)

    def slide(self, slots: Tensor, starts: Tensor, tokens: Sequence[int], known: Tensor | None = None) -> None:
        """Replace each row's window; known as in `run`."""
        for row, slot, new in self._rows(slots, starts, tokens):
            window = self.windows[slot, :WINDOW].tolist() if known is None or known[row] else [0] * WINDOW
            self.windows[slot, :WINDOW] = torch.tensor([*window, *new][-WINDOW:])

    def run_drafts(self, slots: Tensor, accepted: Tensor, starts: Tensor, tokens: Sequence[int]) -> None:
        """Start from the column that the last step's accepted tokens chose, and write a column for each token.

        accepted: int [rows], the tokens that counted in the last step, at least 1.
        """
        for row, slot, new in self._rows(slots.gather(1, accepted[:, None].long() - 1)[:, 0], starts, tokens):
            state = int(self.states[slot])
            for column, token in enumerate(new[: slots.shape[1]]):
                state = after(state, token)
                if (target := int(slots[row, column])) > self._null:
                    self.states[target] = state

    def slide_drafts(self, slots: Tensor, accepted: Tensor, starts: Tensor, tokens: Sequence[int]) -> None:
        """Keep the end of the window that the accepted tokens chose, and append every token."""
        for row, slot, new in self._rows(slots, starts, tokens):
            first = int(accepted[row])
            kept = self.windows[slot, first : first + WINDOW - 1].tolist()
            text = torch.tensor([*kept, *new][: self.windows.shape[1]])
            self.windows[slot, : len(text)] = text

    def _rows(self, slots: Tensor, starts: Tensor, tokens: Sequence[int]) -> Iterator[tuple[int, int, Sequence[int]]]:
        edges = starts.tolist()
        for row, slot in enumerate(slots.tolist()):
            if slot > self._null and (new := tokens[edges[row] : edges[row + 1]]):
                yield row, slot, new
