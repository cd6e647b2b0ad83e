"""Timings of the drafter and its parts. They inform and never gate: no test is timed.

The package is not in the wheel. From a checkout, run it with `attn-backends bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import torch

from benchmarks.cases.advance import advance_rows, step_rows
from benchmarks.cases.backend_rounds import round_rows
from benchmarks.cases.block_trees import block_tree_round_rows, block_tree_rows
from benchmarks.cases.compiled_steps import SUFFIX as COMPILED
from benchmarks.cases.compiled_steps import compiled_step_rows
from benchmarks.cases.cpu import cpu_rows
from benchmarks.cases.decode import decode_rows
from benchmarks.cases.draft_rounds import block_draft_rows, random_draft_rows
from benchmarks.cases.products import CASE as PRODUCTS
from benchmarks.cases.products import product_rows
from benchmarks.cases.recurrent_state import CASE as RECURRENT_STATE
from benchmarks.cases.recurrent_state import recurrent_state_rows
from benchmarks.cases.sampling import sampling_rows
from benchmarks.cases.throughput import block_throughput_rows, throughput_rows
from benchmarks.cases.tree_verify import tree_rows
from benchmarks.measure import DeviceRates, kernel_interval
from benchmarks.random_drafts import BLOCK_DRAFTS, PUBLISHED_DRAFTS, RANDOM_DRAFTS
from benchmarks.report import part_of
from benchmarks.rows import EMPTY, Bench, BenchRow
from builders import BatchError
from builders.devices import on_device
from spec_decode.environment import environment

__all__ = ["CASES", "CPU_CASES", "SUITES", "Bench", "run"]

_DECODE = {
    "sparse-decode": "sparse_swa_mla against FlashMLA, over fp8_ds_mla and over bf16",
    "mla-decode": "triton_mla and flashmla against FlashInfer's and FlashAttention-3's latent attention",
    "paged-decode": "triton_paged against FlashAttention-3 and FlashInfer on tensor cores",
    "paged-verify": "the same over the 8 tokens of a verification, after up to 96k of context",
    "flashinfer-decode": "flashinfer's choice against each of its kernels, by query heads per KV head",
}
_ROWS: dict[str, tuple[str, Callable[[Bench], Iterator[BenchRow]]]] = {
    "advance": ("GPU time of the fused advance of all KV groups, and of each backend's advance", advance_rows),
    "step": ("FlashInfer's advance and attention, planned on the device and on the host", step_rows),
    **{case: (description, partial(decode_rows, case=case)) for case, description in _DECODE.items()},
    "sampling": ("top-k, top-p, draws and argmax against FlashInfer's sampling and torch", sampling_rows),
    "tree-verify": ("tree attention against a chain of as many tokens", tree_rows),
    RECURRENT_STATE: ("a step of recurrent state against kernels that write 1 + K states", recurrent_state_rows),
    "round": ("full-loop rounds of every backend, host and GPU time", round_rows),
    **{name: (case.description, partial(random_draft_rows, name=name)) for name, case in RANDOM_DRAFTS.items()},
    **{name: (case.description, partial(block_draft_rows, name=name)) for name, case in BLOCK_DRAFTS.items()},
    PRODUCTS: ("each matrix product of these drafts against torch's", product_rows),
    **{
        f"{name}{COMPILED}": (f"later steps of {name} against torch.compile's", partial(compiled_step_rows, name=name))
        for name in PUBLISHED_DRAFTS
    },
    "throughput": ("output tokens per second of the whole engine, with and without a graph of step 0", throughput_rows),
    "block-throughput": (
        "the same for a block draft against a step-by-step draft",
        block_throughput_rows,
    ),
    "block-trees": ("trees of the shipped pair's block against a chain: accepted tokens", block_tree_rows),
    "cpu": ("on a CPU: load, prompt, decoding and memory of LLM against transformers, by SmolLM2", cpu_rows),
    "block-tree-rounds": ("trees of Qwen3-8B's block against a chain: time", block_tree_round_rows),
}
CPU_CASES = ("sampling", "round", "drafter-tiny", "block-trees", "cpu", RECURRENT_STATE)
"""Cases that run without a GPU; their gpu_us is null."""
SUITES = {
    "backends": ("advance", "step", *_DECODE, "round"),
    "blocks": (*BLOCK_DRAFTS, "block-throughput"),
    "trees": ("block-trees", "block-tree-rounds"),
    "drafter": (*PUBLISHED_DRAFTS, "throughput"),
    "competitors": (PRODUCTS, *(f"{name}{COMPILED}" for name in PUBLISHED_DRAFTS)),
}
"""Names for groups of cases."""
CASES = {
    **{name: description for name, (description, _) in _ROWS.items()},
    **{name: f"all of {', '.join(cases)}" for name, cases in SUITES.items()},
}


def run(
    *,
    device: torch.device,
    cases: Sequence[str] | None = None,
    on_row: Callable[[Bench], None] | None = None,
    command: str = "",
) -> Bench:
    """Time these cases and suites, or all. Members of a suite that need a GPU are noted if there is none.

    on_row: called with the run so far after each row.

    Raises BatchError if a case named explicitly needs a CUDA device and there is none, and if nothing could be timed.
    """
    on_cuda = device.type == "cuda"
    need_cuda = [] if on_cuda else [case for case in cases or () if case not in (*CPU_CASES, *SUITES)]
    if need_cuda:
        raise BatchError(
            f"the cases {', '.join(need_cuda)} time a CUDA device, but this run is on {device.type}. Run "
            f"{', '.join(CPU_CASES)}, or use a machine with a GPU."
        )
    with on_device(device):
        rates, interval = (DeviceRates.measured(), kernel_interval()) if on_cuda else (None, None)
    env = msgspec.to_builtins(environment(device))
    env |= {name: rates and round(getattr(rates, name)) for name in ("copy_bytes_per_us", "matmul_flops_per_us")}
    bench = Bench(device, rates, {**env, "kernel_interval_us": interval}, command)
    for case in _expanded(cases):
        if not on_cuda and case not in CPU_CASES:
            bench.miss(case, f"times a CUDA device, but this run is on {device.type}")
            continue
        with on_device(device), bench.noting(case):
            for row in (timed := _ROWS[case][1])(bench):
                bench.rows.append({**EMPTY, **row})
                bench.roots.setdefault(part_of(row), set()).add(getattr(timed, "func", timed).__module__)
                if on_row:
                    on_row(bench)
    if not bench.rows:
        raise BatchError(
            f"nothing could be timed: {'; '.join(bench.missing)}. Install what is missing, or name other cases."
        )
    return bench


def _expanded(cases: Sequence[str] | None) -> list[str]:
    """Return single cases, each once."""
    return list(dict.fromkeys(case for name in cases or _ROWS for case in SUITES.get(name, (name,))))
