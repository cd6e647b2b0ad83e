"""The rounds' inputs, put on the device for many rounds at once so that a round costs the host next to nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter

import torch

from spec_decode.drafter import VerifiedTokens
from spec_decode.models import ModelConfig
from spec_decode.tools.soak.schedule import ScheduledRound

CHUNK = 128
"""Rounds loaded at a time."""

_SCHEDULED = {
    "context_lens": ("context", torch.int32),
    "accepted": ("accepted", torch.int32),
    "temperature": ("temperature", torch.float32),
    "seeds": ("seed", torch.int64),
}
"""What a schedule decides: the input, the field of a row that it comes from, its dtype."""


class RoundInputs:
    """Buffers for CHUNK rounds, allocated once: memory that moves would look like a leak."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, max_reqs: int, k: int, seed: int
    ) -> None:
        """k: draft tokens of a round."""
        self._vocab = config.vocab_size
        self._random = torch.Generator().manual_seed(seed)
        rows = (CHUNK, max_reqs)
        self._buffers = {
            "token_ids": torch.zeros(*rows, k + 1, dtype=torch.int64, device=device),
            "target_hidden_states": torch.zeros(*rows, k + 1, config.hidden_size, dtype=dtype, device=device),
            "next_tokens": torch.zeros(rows, dtype=torch.int64, device=device),
            **{name: torch.zeros(rows, dtype=kind, device=device) for name, (_, kind) in _SCHEDULED.items()},
        }

    def rounds(self, schedule: Iterator[ScheduledRound], count: int) -> Iterator[tuple[ScheduledRound, VerifiedTokens]]:
        """The next `count` rounds of a schedule, each with what it starts from."""
        for begin in range(0, count, CHUNK):
            rounds = list(islice(schedule, min(CHUNK, count - begin)))
            self._load(rounds)
            for place, round_ in enumerate(rounds):
                live = len(round_.rows)
                yield round_, VerifiedTokens(**{name: held[place, :live] for name, held in self._buffers.items()})

    def _load(self, rounds: Sequence[ScheduledRound]) -> None:
        """Replace the content: what the schedule decided for up to CHUNK rounds, and noise for all else."""
        for name in ("token_ids", "next_tokens"):
            buffer = self._buffers[name]
            buffer.copy_(torch.randint(0, self._vocab, buffer.shape, generator=self._random))
        hidden = self._buffers["target_hidden_states"]
        hidden.copy_(torch.randn(hidden.shape, generator=self._random))
        for name, (field, dtype) in _SCHEDULED.items():
            buffer, get = self._buffers[name], attrgetter(field)
            pad = [0] * buffer.shape[1]
            rows = [[*map(get, round_.rows), *pad][: len(pad)] for round_ in rounds]
            buffer[: len(rounds)].copy_(torch.tensor(rows, dtype=dtype))
