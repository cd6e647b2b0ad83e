"""Inputs of hyper-connections, and their reads and writes computed in float64, number by number.

Legend: T tokens, S streams, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPS = 1e-3
"""Large enough that each of its uses is visible."""


@dataclass
class Case:
    """Streams [T, S, H] and a block's output [T, H]; mixes [T, S (2 + S)], scale [3] and base [S (2 + S)] fp32."""

    streams: torch.Tensor
    output: torch.Tensor
    mixes: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor

    @property
    def head(self):
        """Parameters that collapse the streams: mixes [T, S], scale [1] and base [S]."""
        count = self.streams.shape[1]
        return self.mixes[:, :count].contiguous(), self.scale[:1], self.base[:count]


def make_case(tokens=3, streams=4, hidden=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens + 10 * streams)

    def draw(*shape, size=1.0):
        return torch.randn(*shape, generator=generator) * size

    width = streams * (2 + streams)
    return Case(
        streams=draw(tokens, streams, hidden).to(dtype),
        output=draw(tokens, hidden).to(dtype),
        mixes=draw(tokens, width, size=3),
        scale=draw(3),
        base=draw(width),
    )


def exact_read(case, iterations):
    """Return the input [T, H], write [T, S] and carry [T, S, S]."""
    count = case.streams.shape[1]
    sizes = [count, count, count * count]
    factors = torch.cat([case.scale[part].double().expand(size) for part, size in enumerate(sizes)])
    read, write, carry = (case.mixes.double() * factors + case.base.double()).split(sizes, 1)
    carry = torch.stack([doubly_stochastic(token.view(count, count), iterations) for token in carry])
    return summed(case.streams, read), 2 / (1 + (-write).exp()), carry


def exact_collapse(case):
    mixes, scale, base = (part.double() for part in case.head)
    return summed(case.streams, mixes * scale + base)


def summed(streams, logits):
    shares = 1 / (1 + (-logits).exp()) + EPS
    return sum(shares[:, s, None] * streams[:, s].double() for s in range(streams.shape[1]))


def doubly_stochastic(logits, iterations):
    matrix = (logits - logits.max()).exp()
    matrix = matrix / matrix.sum(1, keepdim=True) + EPS
    for turn in range(2 * iterations - 1):
        matrix = matrix / (matrix.sum(turn % 2, keepdim=True) + EPS)
    return matrix


def exact_write(streams, output, write, carry):
    """Return the streams [T, S, H] after a block."""
    out = torch.empty(streams.shape, dtype=torch.float64)
    for token, to in ((t, s) for t in range(streams.shape[0]) for s in range(streams.shape[1])):
        out[token, to] = write[token, to].double() * output[token].double()
        for source in range(streams.shape[1]):
            out[token, to] += carry[token, source, to].double() * streams[token, source].double()
    return out


def assert_rounded(found, exact, dtype):
    """Assert this dtype, and the accuracy of rounding to it after a float32 sum."""
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
