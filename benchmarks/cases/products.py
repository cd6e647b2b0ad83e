"""The products of drafts one by one: this library's next to torch's, which are cuBLAS's on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from attn_backends.kernels.linear.linear import linear
from attn_backends.kernels.linear.product_kind import ProductKind, product_kind
from benchmarks.cases.compiled_steps import model_step, step_inputs
from benchmarks.decode_fixture import COLD_BYTES
from benchmarks.measure import time_in_turn
from benchmarks.random_drafts import PUBLISHED_DRAFTS
from benchmarks.rounds import TimedDraft
from benchmarks.rows import Bench, BenchRow, with_limits
from spec_decode.graphs.dispatch_mode import PlainDispatchMode
from spec_decode.tools.timing_limit import TimingLimit

CASE = "products"
_ROWS = (1, 4, 16, 32, 96, 160)
"""The last two occur in blocks and in rounds that verify many drafts; near 160, torch's own product takes over."""
_SMALLEST = 1 << 19
"""Number of elements from which a weight matters in a step's time."""
_RIGHT = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}
"""Index of a product's right-hand argument."""
_NO_SLOWER = TimingLimit("peer_ratio", 1.0)


def product_rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield a row of this library and one of torch for each weight shape of the drafts, except at numbers of rows where
    this library uses torch's product."""
    seen: set[torch.Size] = set()
    for name, case in PUBLISHED_DRAFTS.items():
        with bench.noting(f"{CASE}: {name}"), torch.no_grad():
            for weight in weights_of(TimedDraft.of(case, bench.device), bench.device):
                if weight.shape not in seen and weight.numel() >= _SMALLEST:
                    seen.add(weight.shape)
                    yield from _compared(bench, f"{name}: {weight.shape[1]} to {weight.shape[0]}", weight)


def weights_of(draft: TimedDraft, device: torch.device) -> list[torch.Tensor]:
    """Return the matrices [N, K] that a later step multiplies by, including the head but not a mixture's experts."""
    step, inputs, products = model_step(draft, 1, device), step_inputs(draft, 1, device), _Products()
    with torch.enable_grad(), products:  # gradients select torch's products
        step(*inputs)
    return products.weights


class _Products(PlainDispatchMode):
    """Records the right-hand sides of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _RIGHT:
            self.weights.append(args[_RIGHT[func]].mT)
        return func(*args, **kwargs)


def _compared(bench: Bench, spec: str, weight: torch.Tensor) -> Iterator[BenchRow]:
    copies = cold_copies(weight)
    for rows in _ROWS:
        x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
        if product_kind(x, weight) is ProductKind.TORCH:
            continue
        ours, theirs = (time_in_turn(partial(product, x), copies) for product in (linear, F.linear))
        floor = {"floor_us": bench.floor_us(weight.nbytes), "floor_counts": "the weight"}
        labels = {"case": CASE, "spec": spec, "num_reqs": rows, **floor}
        ratio = round(ours["p50"] / theirs["p50"], 3)
        row = {**labels, "backend": "attn-backends", "gpu_us": ours, "peer_ratio": ratio}
        yield with_limits(row, _NO_SLOWER)
        yield {**labels, "backend": "torch", "peer": True, "gpu_us": theirs}


def cold_copies(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return enough copies of the weight that none is in a cache when its turn comes again."""
    return [weight, *(weight.clone() for _ in range(COLD_BYTES // weight.nbytes))]
