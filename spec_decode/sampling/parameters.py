"""How requests want their tokens sampled: on the host per request, on the device per row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from builders.errors import require

MIN_TEMPERATURE = 1e-3
"""A lower one would make logits / temperature overflow fp32; greedy decoding is temperature 0."""

_MAX_TEMPERATURE = torch.finfo(torch.float32).max
_MAX_TOP_K = torch.iinfo(torch.int32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled. Raises BatchError for a value outside the ranges below.

    - temperature  0 is greedy, and top_k and top_p change nothing; otherwise at least MIN_TEMPERATURE
    - top_k        keeps tokens whose logit is among the k largest; 0 keeps the whole vocabulary
    - top_p        keeps, of those, the fewest most probable that hold this share of their probability, in (0, 1]; 1
                   keeps all
    - seed         64 bits, signed. Same seed, same noise, whatever else is in the batch; in fp32 the same text
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            _is_number(self.temperature)
            and (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE),
            f"temperature must be 0 (greedy) or a finite number of at least {MIN_TEMPERATURE:g}, got "
            f"{self.temperature!r}; logits over it would leave fp32. Use 0 for greedy decoding, or a larger one.",
        )
        require(
            type(self.top_k) is int and 0 <= self.top_k <= _MAX_TOP_K,
            f"top_k must be an integer from 0 (the whole vocabulary) to {_MAX_TOP_K}, got {self.top_k!r}; it names no "
            "number of tokens to keep. Pass how many, or 0.",
        )
        require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            f"top_p must be a share of the probability above 0 and at most 1 (everything), got {self.top_p!r}; no set "
            "of tokens holds it. Pass such a share, or 1.",
        )
        require(
            type(self.seed) is int and -(2**63) <= self.seed < 2**63,
            f"seed must be a signed 64-bit integer, got {self.seed!r}; the device could not hold it. Choose a smaller "
            "one.",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Sampling(NamedTuple):
    """Sampling parameters of R rows on the device. Captured verification reads the tensors, so they stay in place.

    - temperature  fp32 [R]; 0 is greedy, padding rows are
    - top_k        int32 [R]; 0 keeps the whole vocabulary
    - top_p        fp32 [R], in (0, 1]; 1 keeps everything
    - seeds        int64 [R]
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, device: torch.device | str) -> Sampling:
        """Persistent rows, all padding until load()."""
        return cls(
            temperature=torch.zeros(max_reqs, dtype=torch.float32, device=device),
            top_k=torch.zeros(max_reqs, dtype=torch.int32, device=device),
            top_p=torch.ones(max_reqs, dtype=torch.float32, device=device),
            seeds=torch.zeros(max_reqs, dtype=torch.int64, device=device),
        )

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> Sampling:
        """A row for each of `params`."""
        sampling = cls.allocate(len(params), device)
        sampling.load(params)
        return sampling

    def load(self, params: Sequence[SamplingParams]) -> None:
        """Write `params` to the first rows and make the others padding, in place; host work, not for a graph.

        Raises BatchError, with nothing written, for more of them than there are rows.
        """
        rows = len(self.seeds)
        require(
            len(params) <= rows,
            f"at most {rows} requests fit these sampling parameters, got {len(params)}; nothing was written. Allocate "
            "more rows or run the rest in another batch.",
        )
        padded = [*params, *[SamplingParams()] * (rows - len(params))]
        self.temperature.copy_(torch.tensor([each.temperature for each in padded], dtype=torch.float32))
        # Restricting a greedy row would cost a search that cannot change its argmax.
        self.top_k.copy_(torch.tensor([each.top_k if each.temperature else 0 for each in padded], dtype=torch.int32))
        self.top_p.copy_(torch.tensor([each.top_p if each.temperature else 1.0 for each in padded]))
        self.seeds.copy_(torch.tensor([each.seed for each in padded], dtype=torch.int64))

    def head(self, rows: int) -> Sampling:
        """Views of the first rows."""
        return Sampling(*(tensor[:rows] for tensor in self))
