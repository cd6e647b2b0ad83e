"""Time ways to cut the linear layers of a draft's step on a GPU: python scripts/tune_skinny_linear.py.

Weights come from copies that together exceed the L2 cache, as in a step, which reads other weights in between. A line
per layer and number of rows: the best tiling and its time, that over the time to read the weight once (the floor), the
time of the table's own tiling, and that of torch's linear layer alone, without what the kernel folds into it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional as F

from benchmarks.measure import copy_bandwidth, time_kernels
from benchmarks.random_drafts import RANDOM_DRAFTS
from spec_decode.models.kernels.skinny_linear import SkinnyLinear
from spec_decode.models.kernels.skinny_tiling import MAX_SUMS, Tiling, power_of_two, tile_of

ROWS = (1, 2, 3, 4)
EPS = 1e-6
BEYOND_L2 = 256 << 20
"""Bytes of a layer's copies together: twice the largest L2 cache, and room."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer [n, k] of a draft, twice with a gate, and what its kernel folds in."""

    name: str
    n: int
    k: int
    norm: bool = False
    gated: bool = False
    residual: bool = False
    embed: bool = False

    @property
    def height(self) -> int:
        """Rows of its weight."""
        return self.n * (1 + self.gated)


def layers_of(label: str, config: dict[str, Any]) -> list[Layer]:
    """The linear layers of a step of the draft with that config.json."""
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    return [
        Layer(f"{label} fuse", hidden, 2 * hidden, embed=True),
        Layer(f"{label} qkv", queries + 2 * config["num_key_value_heads"] * head_dim, hidden, norm=True),
        Layer(f"{label} out", hidden, queries, residual=True),
        Layer(f"{label} gate_up", intermediate, hidden, norm=True, gated=True),
        Layer(f"{label} down", hidden, intermediate, residual=True),
        Layer(f"{label} head", config["vocab_size"], hidden),
    ]


LAYERS = [
    *layers_of("8b", RANDOM_DRAFTS["llama3-8b-eagle"].config),
    *layers_of("1024", RANDOM_DRAFTS["eagle-1024"].config),
    # EAGLE-3 drafts: the projection takes embedding and state side by side, and the head norms.
    Layer("2880 qkv", 5120, 5760),
    Layer("2880 out", 2880, 4096, residual=True),
    Layer("2880 gate_up", 17280, 2880, norm=True, gated=True),
    Layer("2880 down", 2880, 17280, residual=True),
    Layer("2880 head", 64000, 2880, norm=True),
    Layer("8b-3 qkv", 6144, 8192),
    Layer("8b-3 down", 4096, 12288, residual=True),
    Layer("8b-3 head", 32000, 4096, norm=True),
]


class Operands:
    """The tensors of one layer at some number of rows, bfloat16, with as many weights as exceed the L2 cache."""

    def __init__(self, layer: Layer, rows: int, copies: int) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

        self.layer, self.rows, self.copies = layer, rows, copies
        self.weights = [draw(layer.height, layer.k) * layer.k**-0.5 for _ in range(copies)]
        self.x = draw(rows, layer.k // 2 if layer.embed else layer.k)
        self.ids = torch.arange(rows, device="cuda") if layer.embed else None
        self.embedding = draw(rows, layer.k // 2) if layer.embed else None
        self.norm = draw(layer.k) if layer.norm else None
        self.residual = draw(rows, layer.n) if layer.residual else None
        self._turn = count()

    def run(self, tile: Tiling, copy: int | None = None) -> torch.Tensor:
        """The kernel, over the next copy or a given one."""
        weight = self.weights[(next(self._turn) if copy is None else copy) % self.copies]
        eps = EPS if self.layer.norm else None
        arguments = SkinnyLinear(
            self.x, weight, self.ids, self.embedding, None, self.norm, self.residual, eps, self.layer.gated
        )
        return arguments.launch(tile)[1]

    def by_torch(self) -> torch.Tensor:
        """The linear layer alone, over the next copy."""
        x = self.x.repeat(1, 2) if self.layer.embed else self.x
        return F.linear(x, self.weights[next(self._turn) % self.copies])

    def check(self, tile: Tiling) -> None:
        """Raise unless the kernel agrees with torch in fp32."""
        x = self.x.float()
        if self.ids is not None and self.embedding is not None:
            x = torch.cat([self.embedding[self.ids].float(), x], 1)
        if self.norm is not None:
            x = F.rms_norm(x, self.norm.shape, self.norm.float(), EPS)
        wanted = x @ self.weights[0].float().T
        if self.layer.gated:
            gate, up = wanted.chunk(2, 1)
            wanted = F.silu(gate) * up
        if self.residual is not None:
            wanted = wanted + self.residual.float()
        torch.testing.assert_close(self.run(tile, 0).float(), wanted, rtol=2e-2, atol=2e-2)


CUTS = [
    Tiling(1, 1024, 4), Tiling(2, 1024, 4), Tiling(4, 1024, 4), Tiling(2, 2048, 8), Tiling(2, 512, 2),
    Tiling(4, 512, 2), Tiling(2, 2048, 4), Tiling(4, 1024, 4, 3), Tiling(1, 2048, 8), Tiling(1, 1024, 4, 3),
    Tiling(2, 1024, 4, 3), Tiling(2, 1024, 8), Tiling(4, 1024, 8), Tiling(2, 512, 4), Tiling(4, 512, 4),
    Tiling(8, 512, 4), Tiling(2, 512, 2, 3), Tiling(4, 512, 4, 3), Tiling(1, 1024, 8), Tiling(4, 256, 2, 3),
    Tiling(8, 256, 4, 3), Tiling(8, 1024, 8, 3), Tiling(4, 512, 2, 3), Tiling(8, 512, 4, 3), Tiling(8, 256, 2, 3),
    Tiling(2, 512, 4, 3), Tiling(4, 1024, 8, 3), Tiling(2, 1024, 8, 3), Tiling(16, 256, 4, 3),
]  # fmt: skip


def candidates(layer: Layer, rows: int) -> list[Tiling]:
    """The table's tiling first, then others whose sums stay in registers."""
    height = power_of_two(rows) * (1 + layer.gated)
    fitting = [
        cut
        for cut in CUTS
        if height * cut.block_n * cut.block_k <= 2 * MAX_SUMS * 32 * cut.num_warps and cut.block_k <= layer.k
    ]
    return list(dict.fromkeys([tile_of(rows, layer.n, layer.k, gated=layer.gated), *fitting]))


@torch.no_grad()
def compile_all(job: tuple[Layer, int]) -> None:
    """Run every candidate once, so that its kernel lies in Triton's cache; in a process of its own."""
    layer, rows = job
    operands = Operands(layer, rows, 1)
    for tile in candidates(layer, rows):
        operands.run(tile)
    torch.cuda.synchronize()


def tuned(layer: Layer, rows: int, bandwidth: float) -> str:
    """The line for a layer at some number of rows."""
    size = 2 * layer.height * layer.k
    copies = 1 + BEYOND_L2 // size
    operands, calls = Operands(layer, rows, copies), copies * -(-8 // copies)
    times: dict[Tiling, float] = {}
    for tile in candidates(layer, rows):
        operands.check(tile)
        times[tile] = time_kernels(partial(operands.run, tile), calls=calls)["p50"]
    own, best = next(iter(times)), min(times, key=lambda tile: times[tile])
    linear = time_kernels(operands.by_torch, calls=calls)["p50"]
    floor = size / bandwidth
    return (
        f"{layer.name:13} rows {rows:2}: {times[best]:8.2f} us, {times[best] / floor:5.2f} of the floor {floor:6.2f}; "
        f"table {times[own]:8.2f}; F.linear {linear:8.2f}; {best}"
    )


def lines(jobs: list[tuple[Layer, int]], seconds: float) -> Iterator[str]:
    """A line a job, and one that names the jobs there was no time for."""
    began = time.monotonic()
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        list(pool.map(compile_all, jobs))
    yield f"compiled in {time.monotonic() - began:.0f} s"
    bandwidth = copy_bandwidth()
    for at, (layer, rows) in enumerate(jobs):
        if time.monotonic() - began > seconds:
            yield "no time for " + ", ".join(f"{layer.name} {rows}" for layer, rows in jobs[at:])
            return
        yield tuned(layer, rows, bandwidth)


@torch.no_grad()
def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="layers whose name holds this")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=55)
    flags = parser.parse_args()
    jobs = [(layer, rows) for rows in flags.rows for layer in LAYERS if flags.only in layer.name]
    for line in lines(jobs, flags.seconds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
