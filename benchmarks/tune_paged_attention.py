"""Time tiles of attention over a paged cache: python -m benchmarks.tune_paged_attention, on a GPU.

Prints a line per batch of prompts or of verifications: the tile and splits in use, then the best ones, with their
teraflops a second, and those of torch's own attention over the same tokens without pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_backends.kernels.paged_attention import PagedAttentionArguments
from benchmarks.fitting_tiles import fitting_tiles
from benchmarks.measure import time_kernels

_DEVICE = torch.device("cuda")
_PAGE = 16
_HEADS = 32
_TILES = tuple(product((32, 64, 128), (4, 8), (1, 2, 3)))
"""Tokens a block, warps and stages."""
_PROMPT_ROWS = (64, 128)
"""Rows of a prompt's tiles. Those of few queries have as many as there are."""


@dataclass(frozen=True, slots=True)
class RandomBatch:
    """Requests with `tokens` queries each behind `cached` tokens that the cache holds already: prompts, or
    verifications."""

    requests: int
    tokens: int
    cached: int
    kv_heads: int
    dim: int
    splits: int = 1

    def draw(self) -> PagedAttentionArguments:
        """Return the op's arguments, bfloat16; each request's pages are shuffled among all."""
        length, lens = self.cached + self.tokens, self.requests * [self.cached + self.tokens]
        pages = -(-length // _PAGE)
        table = torch.randperm(self.requests * pages, device=_DEVICE).int().view(self.requests, pages)
        cache = torch.randn(
            self.requests * pages, 2, _PAGE, self.kv_heads, self.dim, device=_DEVICE, dtype=torch.bfloat16
        )
        starts = torch.arange(self.requests + 1, device=_DEVICE, dtype=torch.int32) * self.tokens
        query = torch.randn(self.requests * self.tokens, _HEADS, self.dim, device=_DEVICE, dtype=torch.bfloat16)
        return PagedAttentionArguments(
            query=query, key_cache=cache[:, 0], value_cache=cache[:, 1], block_table=table,
            seq_lens=torch.tensor(lens, device=_DEVICE, dtype=torch.int32), query_start_loc=starts, sinks=None,
            tree_masks=None, max_query_len=self.tokens, max_seq_len=length, num_splits=self.splits,
            scale=self.dim**-0.5, sliding_window=None, soft_cap=None, causal=True, batch_invariant=False,
            key_scale=None, value_scale=None,
        )  # fmt: skip

    @property
    def flops(self) -> int:
        """Floating-point operations, without those on hidden tokens."""
        seen = self.tokens * self.cached + self.tokens * (self.tokens + 1) // 2
        return 4 * self.requests * _HEADS * self.dim * seen

    def describe(self) -> str:
        """Return its sizes, in words."""
        heads = f"{_HEADS} / {self.kv_heads} heads of {self.dim}"
        return f"{self.requests} x {self.tokens} after {self.cached}, {heads}, {self.splits} splits"


BATCHES = (
    RandomBatch(8, 1000, 0, 8, 128), RandomBatch(1, 8192, 0, 8, 128), RandomBatch(1, 8192, 24576, 8, 128),
    RandomBatch(8, 1000, 0, 8, 64), RandomBatch(8, 1000, 0, 4, 256), RandomBatch(8, 1000, 0, 32, 128),
    # Two programs for each of an H200's SMs, and three.
    *(RandomBatch(1, 8, 98304, 8, 128, splits) for splits in (33, 49)),
    *(RandomBatch(8, 8, 32768, 8, 128, splits) for splits in (4, 6)),
)  # fmt: skip


@torch.no_grad()
def compiled(batch: RandomBatch) -> list[dict[str, int]]:
    """Return the tiles that this device has room for, the one in use first, with their kernels in Triton's cache; raise
    if a result is wrong."""
    arguments = batch.draw()
    return fitting_tiles(_tiles(arguments), arguments.launch, arguments.launch())


def _tiles(arguments: PagedAttentionArguments) -> Iterator[dict[str, int]]:
    own = arguments.own_tile()
    yield own
    rows = _PROMPT_ROWS if own["BLOCK_M"] >= min(_PROMPT_ROWS) else (own["BLOCK_M"],)
    for block_m, (block_n, warps, stages) in product(rows, _TILES):
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
        if tile != own:
            yield tile


def tuned(batch: RandomBatch, tiles: list[dict[str, int]]) -> str:
    """Return the output line of a batch."""
    arguments = batch.draw()
    times = {str(tile): time_kernels(partial(arguments.launch, tile), calls=1)["p50"] for tile in tiles}
    rates = {name: batch.flops / us / 1e6 for name, us in times.items()}
    own, best = str(tiles[0]), sorted(rates, key=lambda name: -rates[name])[:3]
    cells = [f"in use {rates[own]:.0f} {own}", *(f"{rates[name]:.0f} {name}" for name in best)]
    return f"{batch.describe()}: {'; '.join(cells)}; torch {_torch_rate(batch, arguments):.0f}"


def _torch_rate(batch: RandomBatch, arguments: PagedAttentionArguments) -> float:
    """Return the rate of torch's attention, which has no cached tokens' causal form."""
    if batch.cached:
        return float("nan")
    shape = (batch.requests, batch.tokens, -1, batch.dim)
    query = arguments.query.view(shape).transpose(1, 2)
    key, value = (torch.randn_like(query[:, : batch.kv_heads]) for _ in range(2))
    us = time_kernels(
        lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), calls=4
    )["p50"]
    return batch.flops / us / 1e6


def main() -> None:
    """Print the lines."""
    began = time.monotonic()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        found = list(pool.map(compiled, BATCHES))
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for batch, tiles in zip(BATCHES, found, strict=True):
        print(tuned(batch, tiles), flush=True)


if __name__ == "__main__":
    main()
