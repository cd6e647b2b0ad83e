"""Captured steps replay correctly on a GPU shared by several processes.

For every graph, each process makes a fresh builder with fresh wrappers, captures one uniform step, and replays it over
batches that it writes without waiting: nothing on the host synchronises between the writes of the state, the replay and
the next batch. Wrappers of earlier graphs are freed while their work may be pending. Every output is compared with fp32
attention over the logical keys, every plan with the one that torch's formula computes for the same lengths.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_backends import KVCache, get
from attn_backends.triton_paged import TritonPaged
from builders import AttentionSpec, BatchBuffers, RequestTables, set_extend_state
from builders.flashinfer.plan import replan
from builders.kernels.triton_runtime import torch_implementations
from spec_decode.graphs import runtime_for

SCHEMA = "attn-shared-gpu-replays/1"
BACKEND, PROCESSES, GRAPHS, REPLAYS = "flashinfer", 6, 100, 40
"""How many graphs a process captures, in about three minutes on an H200, and how often it replays each."""
ROWS, MAX_SEQ_LEN, TOLERANCE = 12, 512, 0.02
"""The tolerance is ten times what fp16 attention over this length was seen to be off by."""


@dataclass(frozen=True)
class Shape:
    """One captured step: ROWS rows of query_len tokens each."""

    query_len: int
    page_size: int
    num_q_heads: int
    num_kv_heads: int

    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=128,
            page_size=self.page_size,
            dtype=torch.float16,
        )


SHAPES = (Shape(8, 8, 32, 4), Shape(1, 8, 32, 4), Shape(4, 16, 8, 8), Shape(8, 8, 32, 4))
"""The first, seen wrong once by others, takes half of the graphs."""


class CapturedStep:
    """A cache full of known keys and values, and one captured step over it."""

    def __init__(self, name: str, shape: Shape, device: torch.device, random: torch.Generator) -> None:
        self.shape, self.spec, self.device, self.random = shape, shape.spec(), device, random
        backend, width = get(name), MAX_SEQ_LEN // shape.page_size
        num_pages = ROWS * width + 3
        order = torch.randperm(num_pages, device=device, generator=random)[: ROWS * width].view(ROWS, width)
        tokens, sizes = ROWS * shape.query_len, {"max_reqs": ROWS, "max_seq_len": MAX_SEQ_LEN}
        self.tables = RequestTables(page_sizes=[shape.page_size], num_pages=[num_pages], device=device, **sizes)
        self.pages = order.tolist()
        heads = (shape.num_kv_heads, self.spec.head_dim)
        self.key, self.value = (self._numbers(ROWS, MAX_SEQ_LEN, *heads) for _ in range(2))
        self.cache = KVCache(*(self._paged(t, order, num_pages) for t in (self.key, self.value)))
        self.buffers = BatchBuffers(self.tables, max_tokens=tokens)
        self.context = torch.zeros(ROWS, dtype=torch.int32, device=device)
        self.query = self._numbers(tokens, shape.num_q_heads, self.spec.head_dim)
        self.out = torch.empty_like(self.query)
        self.builder = backend.builder(self.spec, device, max_tokens=tokens, **sizes)
        self.buffers.set_uniform(shape.query_len)
        batch = {"num_reqs": ROWS, "num_tokens": tokens, "max_query_len": shape.query_len}
        self.metadata = self.builder.build(self.buffers.view(0, **batch, host_seq_lens=None))
        self.backend = backend
        self.launch = getattr(self.metadata, "launch", None)
        """FlashInfer's; other backends have no plan to compare."""
        self._step()
        self.graph = runtime_for(device).capture(self._step)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.random).half()

    def _paged(self, logical: Tensor, order: Tensor, num_pages: int) -> Tensor:
        size = self.shape.page_size
        cache = torch.full((num_pages, size, *logical.shape[2:]), float("nan"), dtype=torch.float16, device=self.device)
        cache[order.flatten()] = logical.view(-1, size, *logical.shape[2:])
        return cache

    def _step(self) -> None:
        query_len = self.shape.query_len
        set_extend_state(self.buffers, self.context, ROWS, query_len)
        self.builder.advance(self.metadata)
        at = self.buffers.positions.view(ROWS, query_len)
        row = torch.arange(ROWS, device=self.device)[:, None]
        new = (t[row, at].flatten(0, 1) for t in (self.key, self.value))
        self.backend.write_kv(*new, self.cache, self.metadata)
        self.out.copy_(self.backend.forward(self.query, self.cache, self.metadata, spec=self.spec))

    def replay(self, contexts: list[int], live: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write a batch of `live` requests, replay, and take query, output, lengths and plan, waiting for nothing."""
        self.tables.load([self.pages[:live]], [MAX_SEQ_LEN] * live)
        host = torch.tensor(contexts, dtype=torch.int32)
        self.context.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)
        self.query.normal_(generator=self.random)
        self.out.fill_(float("nan"))
        self.graph.replay()
        plan = self.query.new_empty(0) if self.launch is None else self.launch.plan
        return self.query.clone(), self.out.clone(), self.buffers.seq_lens.clone(), plan.clone()

    def error(self, query: Tensor, out: Tensor, lens: Tensor) -> float:
        """The largest difference from attention in fp32 over the logical keys; inf for a NaN."""
        query_len, group = self.shape.query_len, self.spec.group_size
        queries = query.float().view(ROWS, query_len, -1, group, self.spec.head_dim)
        scores = torch.einsum("rqhgd,rkhd->rhgqk", queries, self.key.float()) * self.spec.softmax_scale
        position = lens[:, None] - query_len + torch.arange(query_len, device=self.device)
        seen = torch.arange(MAX_SEQ_LEN, device=self.device) <= position[..., None]
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        expected = torch.einsum("rhgqk,rkhd->rqhgd", weights, self.value.float())
        expected = expected.flatten(2, 3).flatten(0, 1) * (lens > 0).repeat_interleave(query_len)[:, None, None]
        off = (out.float() - expected).abs().amax()
        return float(off.nan_to_num(float("inf")))

    def plan_is_right(self, lens: Tensor, plan: Tensor) -> bool:
        """Whether the plan is what torch's formula makes of these lengths."""
        if self.launch is None or (layout := self.launch.layout) is None:
            return True
        found, ends = plan.cpu(), torch.zeros(ROWS, dtype=torch.int32)
        expected = torch.zeros_like(found)
        with torch_implementations():
            replan(lens.cpu(), ends, expected, layout, row_stride=self.metadata.block_table.shape[1])
        for offset, length in layout.arrays.values():
            part = slice(4 * offset, 4 * (offset + length))
            if not torch.equal(expected[part], found[part]):
                return False
        mask = slice(layout.block_valid_mask, layout.block_valid_mask + layout.padded_tiles)
        return torch.equal(expected[mask], found[mask])


def hunt(process: int, *, name: str, graphs: int, replays: int, device: torch.device) -> dict[str, Any]:
    """What one process saw: graphs, replays, and every output or plan that was off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    random = torch.Generator(device).manual_seed(process)
    host = torch.Generator().manual_seed(process)
    found: dict[str, Any] = {
        "process": process,
        "graphs": graphs,
        "replays": graphs * replays,
        "largest_error": 0.0,
        "wrong": [],
    }
    for graph in range(graphs):
        shape = SHAPES[graph % len(SHAPES)]
        step = CapturedStep(name, shape, device, random)
        context_lens = [
            torch.randint(MAX_SEQ_LEN - shape.query_len, (ROWS,), generator=host).tolist() for _ in range(replays)
        ]
        live = torch.randint(1, ROWS + 1, (replays,), generator=host).tolist()
        kept = [step.replay(*batch) for batch in zip(context_lens, live, strict=True)]
        for number, (query, out, lens, plan) in enumerate(kept):
            contexts = torch.tensor(context_lens[number]) + shape.query_len
            contexts[live[number] :] = 0
            error = step.error(query, out, lens)
            right = torch.equal(lens.cpu().long(), contexts), step.plan_is_right(lens, plan)
            found["largest_error"] = max(found["largest_error"], error)
            if error > TOLERANCE or not all(right):
                wrong = {"graph": graph, "replay": number, "error": error, "lengths_right": right[0]}
                found["wrong"].append({**wrong, "plan_right": right[1], "lengths": lens.tolist(), **asdict(shape)})
    return found


@pytest.mark.gpu
def test_replays_are_right_beside_other_processes(write_report):
    work = partial(hunt, name=BACKEND, graphs=GRAPHS, replays=REPLAYS, device=torch.device("cuda"))
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        rows = pool.map(work, range(PROCESSES))
    write_report(SCHEMA, backends=[BACKEND], tolerance=TOLERANCE, backend=BACKEND, processes=rows)
    assert not [row | {"wrong": row["wrong"][:3]} for row in rows if row["wrong"]]


CPU = torch.device("cpu")


@pytest.mark.parametrize("change, error", [(0.0, 0.0), (0.1, 0.1), (float("nan"), float("inf"))])
def test_replay_error_counts_one_wrong_number(change: float, error: float) -> None:
    step = CapturedStep("triton_paged", SHAPES[0], CPU, torch.Generator().manual_seed(0))
    query, out, lens, _ = step.replay([3, 100, 0, 7] + [0] * 8, live=3)
    out[5, 7, 11] += change
    assert lens.tolist() == [11, 108, 8] + [0] * 9
    assert step.error(query, out, lens) == pytest.approx(error, abs=TOLERANCE / 2)


def test_process_counts_replays_and_names_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(hunt, 0, name="triton_paged", graphs=1, replays=2, device=CPU)
    assert small()["replays"] == 2 and not small()["wrong"]
    real = get("triton_paged").forward
    monkeypatch.setattr(TritonPaged, "forward", lambda self, *args, **kwargs: real(*args, **kwargs) + 1)
    wrong = small()["wrong"]
    assert len(wrong) == 2 and wrong[0]["graph"] == 0 and wrong[0]["lengths_right"] and wrong[0]["error"] > 0.9
