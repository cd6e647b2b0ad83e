"""Time tilings of an 8-bit weight's products over some rows: python -m benchmarks.tune_streamed_linear, on a GPU.

Times every tiling roughly, then the best well. Prints a line per product: the best tilings and their times, the time to
read the weight once (the floor), and the times of the tiling in use, of torch's linear layer of the same weight in
bfloat16, and of the product with rows in 8 bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from attn_backends.kernels.linear.narrow_linear import narrow_linear
from attn_backends.kernels.linear.streamed_linear import StreamedLinear
from attn_backends.kernels.linear.streamed_tiling import StreamedTiling, streamed_tiling
from benchmarks.cases.products import cold_copies
from benchmarks.measure import copy_bandwidth, time_in_turn, time_kernels
from benchmarks.random_product import DEVICE, RandomProduct
from builders.devices import room_of

_WEIGHTS = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False))
"""Outputs, inputs, and whether they are gate and up: a layer of Llama-3-8B, and its output projection."""
_PROGRAMS = ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8))
"""Weight rows in a tile, and warps. Tensor cores multiply tiles of 64 rows and 4 warps asynchronously, others not."""
_BEST = 4
"""Tilings that are timed well."""


@dataclass(frozen=True, slots=True)
class StreamedProduct(RandomProduct):
    """A product with an 8-bit weight."""

    def tilings(self) -> Iterator[StreamedTiling]:
        """Yield the tiling in use, then others."""
        own = streamed_tiling(self.rows, self.n, self.k, room_of(DEVICE), itemsize=1, gated=self.gated)
        yield own
        for (block_n, warps), block_k, shares, stages in product(_PROGRAMS, (128, 256), (1, 2, 4, 8), (3, 5)):
            tile = replace(own, block_n=block_n, num_warps=warps, block_k=block_k, shares=shares, stages=stages)
            if tile != own:
                yield tile

    def run(self, tile: StreamedTiling, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        """Run the kernel with that tiling."""
        return StreamedLinear(x, weight.values, gated=self.gated, scale=weight.scale).launch(tile)


@torch.no_grad()
def compiled(shape: StreamedProduct) -> list[StreamedTiling]:
    """Return the tilings that this device has room for, with their kernels in Triton's cache; raise if a result is
    wrong."""
    x, weight = shape.draw()
    narrow = Fp8Weight.of(weight)
    expected = StreamedLinear(x, narrow.values, gated=shape.gated, scale=narrow.scale).reference()
    fitting = []
    for tile in shape.tilings():
        try:
            found = shape.run(tile, x, narrow)
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            continue
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        fitting.append(tile)
    return fitting


def tuned(shape: StreamedProduct, tilings: list[StreamedTiling], bandwidth: float) -> str:
    """Return the output line of a product."""
    x, weight = shape.draw()
    weights = cold_copies(weight)
    narrow = [Fp8Weight.of(each) for each in weights for _ in range(2)]

    def timed(call: Callable[..., object], operands: list[torch.Tensor] | list[Fp8Weight]) -> float:
        return round(float(time_in_turn(call, operands)["p50"]), 2)

    def rough(tile: StreamedTiling) -> float:
        return time_kernels(lambda: [shape.run(tile, x, each) for each in narrow], calls=1)["p50"]

    own, best = tilings[0], sorted(tilings, key=rough)[:_BEST]
    times = {tile: timed(partial(shape.run, tile, x), narrow) for tile in dict.fromkeys((own, *best))}
    return (
        f"{shape.describe()}: floor {narrow[0].nbytes / bandwidth:.2f} us, "
        f"in use {times[own]} {_short(own)}; F.linear {timed(partial(F.linear, x), weights)}; "
        f"rows in 8 bits {timed(partial(narrow_linear, x), narrow)}; "
        + "; ".join(f"{times[tile]} {_short(tile)}" for tile in sorted(best, key=lambda tile: times[tile]))
    )


def _short(tile: StreamedTiling) -> str:
    return f"n{tile.block_n} w{tile.num_warps} k{tile.block_k} shares{tile.shares} stages{tile.stages}"


@torch.no_grad()
def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=[8, 32, 64], help="numbers of rows")
    flags = parser.parse_args()
    shapes, began = [StreamedProduct(rows, *weight) for weight in _WEIGHTS for rows in flags.rows], time.monotonic()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = list(pool.map(compiled, shapes))
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    for shape, tilings in zip(shapes, found, strict=True):
        print(tuned(shape, tilings, bandwidth), flush=True)


if __name__ == "__main__":
    main()
