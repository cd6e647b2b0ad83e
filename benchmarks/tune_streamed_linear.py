"""Time tilings of an 8-bit weight's products over some rows: python -m benchmarks.tune_streamed_linear, on a GPU.

Times every tiling roughly, then the best well: of rows rounded to 8 bits, or with --bits 16 of rows that stay in 16.
Prints a line per product: the time to read the weight once (the floor), of torch's linear layer in bfloat16, of torch's
product of rounded rows and of the tilings in use, for rows in 8 and in 16 bits; then the best tilings and their times.
Times of rounded rows include the rounding. A line also has the time that a call takes the host.
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
from typing import TypeVar

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from attn_backends.kernels.linear.narrow_linear import narrow_linear
from attn_backends.kernels.linear.streamed_linear import StreamedLinear
from attn_backends.kernels.linear.streamed_tiling import StreamedTiling, streamed_tiling
from benchmarks.cases.products import cold_copies
from benchmarks.fitting_tiles import fitting_tiles
from benchmarks.measure import copy_bandwidth, time_call, time_kernels
from benchmarks.random_product import DEVICE, RandomProduct
from builders.devices import room_of
from builders.kernels.sizes import cdiv

_WEIGHTS = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False))
"""Outputs, inputs, and whether they are gate and up: a layer of Llama-3-8B, and its output projection."""
_ROWS = {8: (8, 32, 64, 128, 256), 16: (8, 32, 64)}
"""By the bits of the rows."""
_PROGRAMS = ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8))
"""Weight rows in a tile, and warps. Tensor cores multiply tiles of 64 rows and 4 warps asynchronously, others not."""
_SHARES = (1, 2, 4, 8)
_BEST = 3
"""Tilings that are timed well."""
_LAUNCHES = 64
"""Launches in a graph that times a tiling well."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamedProduct(RandomProduct):
    """A product with an 8-bit weight, of rows in this many bits."""

    bits: int

    def tilings(self) -> list[StreamedTiling]:
        """Return the tiling in use, then others."""
        x_itemsize, others = (1, self._narrow) if self.bits == 8 else (2, _wide)
        room = room_of(DEVICE)
        own = streamed_tiling(self.rows, self.n, self.k, room, itemsize=1, x_itemsize=x_itemsize, gated=self.gated)
        return list(dict.fromkeys([own, *others(own)]))

    def _narrow(self, own: StreamedTiling) -> Iterator[StreamedTiling]:
        """Yield tilings for rows in 8 bits, without those that cannot be the best: they leave registers or SMs unused
        or have too few, read many rows once for every 64 outputs, halve a tile of 64 for a gate, or load few rows by
        the copy engine or many without it."""
        room, rows = room_of(DEVICE), own.block_m + own.block_m2
        programs = [(64, 4), (128, 4)] * (rows <= 128) + [(128, 8)] * (rows >= 128) + [(256, 8)] * (32 < rows <= 128)
        loads = (False, True) if 32 < rows < 128 else (rows >= 128,)
        for (n, warps), (k, most), shares, tma in product(programs, ((128, 6), (256, 3)), _SHARES, loads):
            busy = shares * cdiv(self.n, n) / room.num_sms
            fitting = min(most, room.shared_memory // ((n + rows) * k))
            asynchronous = n >= 64 * (2 if tma and self.gated else 1)
            if fitting > 1 and asynchronous and busy >= 0.45 and (shares == 1 or busy <= 1.5):
                for stages in (fitting, max(2, fitting - 2)):
                    yield replace(own, block_n=n, num_warps=warps, block_k=k, shares=shares, stages=stages, tma=tma)

    def run(self, tile: StreamedTiling | None, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        """Run the kernel with that tiling; None: the one in use."""
        return self._of(x, weight).launch(tile)

    def reference(self, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
        """Return the product by torch."""
        return self._of(x, weight).reference()

    def _of(self, x: torch.Tensor, weight: Fp8Weight) -> StreamedLinear:
        return StreamedLinear(x, weight.values, gated=self.gated, scale=weight.scale, round_x=self.bits == 8)


def _wide(own: StreamedTiling) -> Iterator[StreamedTiling]:
    """Yield tilings for rows in 16 bits."""
    for (n, warps), k, shares, stages in product(_PROGRAMS, (128, 256), _SHARES, (3, 5)):
        yield replace(own, block_n=n, num_warps=warps, block_k=k, shares=shares, stages=stages)


@torch.no_grad()
def compiled(shape: StreamedProduct) -> list[StreamedTiling]:
    """Return the tilings that this device has room for, with their kernels in Triton's cache; raise if a result is
    wrong."""
    x, weight = shape.draw()
    narrow = Fp8Weight.of(weight)
    return fitting_tiles(shape.tilings(), lambda tile: shape.run(tile, x, narrow), shape.reference(x, narrow))


def tuned(shape: StreamedProduct, tilings: list[StreamedTiling], bandwidth: float) -> str:
    """Return the output line of a product."""
    x, weight = shape.draw()
    weights = cold_copies(weight)
    narrow = [Fp8Weight.of(each) for each in weights for _ in range(2)]

    def timed(call: Callable[[T], object], operands: list[T], launches: int = _LAUNCHES) -> float:
        calls = max(1, launches // len(operands))
        total = time_kernels(lambda: [call(each) for each in operands], calls=calls)["p50"]
        return round(total / len(operands), 2)

    products = (partial(narrow_linear, x, narrow[0]), partial(shape.run, None, x, narrow[0]))
    torch_host, host = (time_call(product, DEVICE).host_us["p50"] for product in products)
    others = {f"rows in {bits} bits": replace(shape, bits=bits) for bits in (8, 16)}
    used = {name: timed(partial(other.run, None, x), narrow) for name, other in others.items()}
    best = sorted(tilings, key=lambda tile: timed(partial(shape.run, tile, x), narrow, 1))[:_BEST]
    times = sorted((timed(partial(shape.run, tile, x), narrow), _short(tile)) for tile in best)
    return (
        f"{shape.describe()}: floor {narrow[0].nbytes / bandwidth:.2f} us; "
        f"F.linear {timed(partial(F.linear, x), weights)}; torch in 8 bits {timed(partial(narrow_linear, x), narrow)}; "
        + "; ".join(f"{name} {us}" for name, us in used.items())
        + f" ({_short(tilings[0])} in use in {shape.bits}); "
        f"on the host, torch in 8 bits {torch_host:.0f}, rows in {shape.bits} bits {host:.0f}; best: "
        + "; ".join(f"{us} {tile}" for us, tile in times)
    )


def _short(tile: StreamedTiling) -> str:
    return f"n{tile.block_n} w{tile.num_warps} k{tile.block_k} shares{tile.shares} stages{tile.stages}" + (
        " tma" if tile.tma else ""
    )


@torch.no_grad()
def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, help="numbers of rows")
    parser.add_argument("--bits", type=int, choices=_ROWS, default=8, help="of the rows whose tilings are timed")
    flags = parser.parse_args()
    rows, began = flags.rows or _ROWS[flags.bits], time.monotonic()
    shapes = [StreamedProduct(count, *weight, flags.bits) for weight in _WEIGHTS for count in rows]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        # The longest first, so that no process ends late.
        by_length = sorted(shapes, key=lambda shape: -len(shape.tilings()))
        found = dict(zip(by_length, pool.map(compiled, by_length), strict=True))
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    for shape in shapes:
        print(tuned(shape, found[shape], bandwidth), flush=True)


if __name__ == "__main__":
    main()
