"""Time tilings of published drafts' products over few rows: python -m benchmarks.tune_skinny_linear, on a GPU.

Prints a line per weight and number of rows: the best tiling and its time, its ratio to the time to read the weight once
(the floor), the time of the table's tiling, and the time of torch's linear layer.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.skinny_linear import SkinnyLinear
from attn_backends.kernels.linear.skinny_tiling import MAX_ROWS, MAX_SUMS, Tiling, tile_of
from benchmarks.cases.products import cold_copies, weights_of
from benchmarks.measure import copy_bandwidth, time_in_turn
from benchmarks.random_drafts import PUBLISHED_DRAFTS
from benchmarks.random_product import DEVICE, RandomProduct
from benchmarks.rounds import TimedDraft
from builders.kernels.sizes import next_power_of_2

_CUTS = [
    Tiling(block_n, warps * inputs, warps, stages)
    for block_n, warps, inputs, stages in product((1, 2, 4, 8), (2, 4, 8), (128, 256), (1, 3))
]


@dataclass(frozen=True, slots=True)
class SkinnyProduct(RandomProduct):
    """A product with few rows."""

    def tilings(self) -> list[Tiling]:
        """Return the table's tiling, then others whose sums stay in registers."""
        height = next_power_of_2(self.rows) * (1 + self.gated)
        own = tile_of(self.rows, self.n // (1 + self.gated), self.k, gated=self.gated)
        others = [
            cut
            for cut in _CUTS
            if height * cut.block_n * cut.block_k <= 2 * MAX_SUMS * 32 * cut.num_warps and cut.block_k <= self.k
        ]
        return list(dict.fromkeys([own, *others]))

    def run(self, tile: Tiling, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Run the kernel with that tiling."""
        return SkinnyLinear(x, weight, gated=self.gated).launch(tile)[1]


def shapes(names: list[str]) -> list[SkinnyProduct]:
    """Return each distinct product of these drafts' steps, at every number of rows the kernel takes."""
    found: dict[SkinnyProduct, None] = {}
    for name in names:
        draft = PUBLISHED_DRAFTS[name]
        gated = 2 * draft.config["intermediate_size"]
        for weight in weights_of(TimedDraft.of(draft, DEVICE), DEVICE):
            if weight.dtype == torch.bfloat16:
                n, k = weight.shape
                found |= dict.fromkeys(SkinnyProduct(count, n, k, n == gated) for count in range(1, MAX_ROWS + 1))
    return list(found)


@torch.no_grad()
def compile_all(shape: SkinnyProduct) -> None:
    """Run every tiling, which puts its kernel into Triton's cache; raise if a result is wrong."""
    x, weight = shape.draw()
    expected = SkinnyLinear(x, weight, gated=shape.gated).reference()[1]
    for tile in shape.tilings():
        torch.testing.assert_close(shape.run(tile, x, weight), expected, rtol=2e-2, atol=2e-2)


def tuned(shape: SkinnyProduct, bandwidth: float) -> str:
    """Return the output line of a shape."""
    x, weight = shape.draw()
    weights = cold_copies(weight)
    times = {tile: time_in_turn(partial(shape.run, tile, x), weights)["p50"] for tile in shape.tilings()}
    own, best, floor = next(iter(times)), min(times, key=lambda tile: times[tile]), weight.nbytes / bandwidth
    return (
        f"{shape.describe()}: {times[best]:.2f} us, "
        f"{times[best] / floor:.2f} of the floor {floor:.2f}; table {times[own]:.2f}; "
        f"F.linear {time_in_turn(partial(F.linear, x), weights)['p50']:.2f}; {best}"
    )


@torch.no_grad()
def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafts", nargs="*", default=list(PUBLISHED_DRAFTS), help="drafts of the bench; all by default")
    flags = parser.parse_args()
    if unknown := [name for name in flags.drafts if name not in PUBLISHED_DRAFTS]:
        parser.error(f"a draft must be one of {', '.join(PUBLISHED_DRAFTS)}, got {', '.join(unknown)}.")
    found, began = shapes(flags.drafts), time.monotonic()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_all, found))
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    for shape in found:
        print(tuned(shape, bandwidth), flush=True)


if __name__ == "__main__":
    main()
