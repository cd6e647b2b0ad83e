"""Where the metadata that a graph read differs from a fresh build for the same batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from attn_backends.engines.vllm.compat import CommonAttentionMetadata, flashmla
from attn_backends.engines.vllm.device_plan import DevicePlan


class Difference(NamedTuple):
    """A place where a graph reads something other than the batch."""

    group: str
    step: int
    field: str
    what: str


class Round(NamedTuple):
    """A round that a full graph has run.

    key         of the graph: its tokens and draft steps
    num_reqs    without padding
    padded      num_reqs with padding
    query_len   query tokens per request
    step        the last one, whose batch is in the buffers
    """

    key: tuple[int, int]
    num_reqs: int
    padded: int
    query_len: int
    step: int
    seq_lens_cpu_upper_bound: torch.Tensor


def compare(captured: Any, fresh: Any, done: Round) -> Iterator[tuple[str, str]]:
    """Yield field and difference for each tensor whose request rows differ from the fresh one.

    Schedules, which divide the work of padding too, are compared only in a batch without padding.
    """
    expected = dict(tensors_of(fresh))
    for name, found in tensors_of(captured):
        if name.endswith("schedule_metadata") and done.num_reqs < done.padded:
            # DeepGEMM's: it also divides the work of padding, whose lengths advance in a graph and are 0 in a build.
            continue
        wanted = expected.get(name)
        if wanted is None or wanted.shape != found.shape:
            yield name, f"has the shape {list(found.shape)}, freshly built {wanted is not None and list(wanted.shape)}"
            continue
        live = _live_rows(len(found), done) if found.dim() else None
        yield from first_difference(name, found[:live] if live else found, wanted[:live] if live else wanted)


def first_difference(name: str, found: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[str, str]]:
    """Yield the first element that differs, as field and difference."""
    if not torch.equal(found, wanted):
        where = tuple((found != wanted).nonzero()[0].tolist())
        yield f"{name}{list(where)}", f"is {found[where].item()}, freshly built {wanted[where].item()}"


def _live_rows(length: int, done: Round) -> int:
    """Return how many of a tensor's first elements belong to requests; a graph's padding has no meaning."""
    rows = {done.padded + 1: done.num_reqs + 1, done.padded * done.query_len: done.num_reqs * done.query_len}
    return {**rows, done.padded: done.num_reqs}.get(length, length)


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested records by path, except scratch space (floats), vLLM's batch, which no kernel reads,
    and FlashMLA's schedule, which no build makes."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            yield name.removeprefix("."), value
    elif isinstance(value, DevicePlan):
        yield from ((f"{name}.{array}".removeprefix("."), content) for array, content in value.arrays().items())
    elif dataclasses.is_dataclass(value) and not isinstance(
        value, (type, CommonAttentionMetadata, flashmla.FlashMLASchedMeta)
    ):
        for field, inner in vars(value).items() if hasattr(value, "__dict__") else _slots(value):
            yield from tensors_of(inner, f"{name}.{field}")


def _slots(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
