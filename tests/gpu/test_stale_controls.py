"""Stale metadata is caught on a device.

For each backend, a builder that builds correctly and then never updates its metadata must pass the check of its build,
and fail the checks of its advance. If a control passes those, they could not have found the defect; if it fails the
first, something else was wrong. Each control runs in its own process, because stale metadata can cause an illegal
memory access, which makes the device unusable for the whole process.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from attn_backends import AttentionBackend, get
from builders import AdvanceSupport, AttentionBatch, AttentionSpec
from spec_decode.conformance import check_backend
from spec_decode.testing.batches import DECODE
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.metadata_fields import tensors_of
from spec_decode.testing.outcome import CheckFailure
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject

JOBS = 10
SCHEMA = "attn-stale-controls/3"
CHECKS = (
    "builder.advance_attends_right",
    "builder.advance_refreshes_another_batch",
    "graph.loop_replays_over_other_batches",
    "graph.verify_replays_over_other_batches",
)
BUILT_RIGHT = "numerics.attention_is_right[[]base-*]"
FAULTS = ("CUDA error", "illegal memory access")
"""A device's messages for what reading by stale metadata may end in."""


def stale(name: str) -> AttentionBackend:
    """The backend, built right and stale after: its advance does nothing, and what it shares with a batch is copied."""
    kind = type(get(name))
    original: Any = kind.builder

    class Stale(original):  # type: ignore[misc]
        building = False

        def allocate(self) -> None:
            super().allocate()
            self.kept: list[dict[str, torch.Tensor]] = []

        @classmethod
        def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
            support: AdvanceSupport = original.advance_support(spec, device)
            return support

        def build(self, batch: AttentionBatch, *, horizon: int = 0) -> Any:
            self.building = True
            metadata = super().build(batch, horizon=horizon)
            self.building = False
            shared = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch).values()}
            views = {n: t for n, t in tensors_of(metadata).items() if t.untyped_storage().data_ptr() in shared}
            copies = {name: views[name].clone() for name in self.step_fields if name in views}
            # As a builder's own buffers do, they live as long as it: a graph may still read them after the metadata.
            self.kept.append(copies)
            return replace(metadata, **copies)

        def advance(self, metadata: Any) -> None:
            if self.building:
                super().advance(metadata)

    backend: AttentionBackend = type("StaleBackend", (kind,), {"builder": Stale, "name": f"{name}_stale"})()
    return backend


def control(job: tuple[str, str], device: torch.device) -> dict[str, Any]:
    """What one check finds of one stale backend: how many cases, the first that is no pass, how it built."""
    name, check = job
    built = check_backend(stale(name), device=device, checks=[BUILT_RIGHT], report=True)
    report = check_backend(stale(name), device=device, checks=[check], report=True)
    ran = [result for result in report.results if result.outcome.value not in ("unsupported", "unavailable")]
    wrong = [result for result in ran if result.outcome.value == "fail" or any(x in result.reason for x in FAULTS)]
    return {
        "backend": name,
        "version": report.version,
        "check": check,
        "cases": len(ran),
        "built_right": built.ok,
        "caught": bool(wrong),
        "first": wrong[0].reason[:300] if wrong else [f"{r.outcome.value}: {r.reason[:300]}" for r in ran[:3]],
    }


@pytest.mark.gpu
def test_every_stale_backend_is_built_right_and_caught(backends, write_report):
    with multiprocessing.get_context("spawn").Pool(JOBS, maxtasksperchild=1) as pool:
        rows = list(pool.imap(partial(control, device=torch.device("cuda")), product(backends, CHECKS)))
    write_report(SCHEMA, backends=backends, controls=rows)
    assert rows and not [row for row in rows if not (row["caught"] and row["built_right"])]


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged", "triton_mla", "sparse_swa_mla"])
def test_control_is_right_until_it_advances(name: str) -> None:
    subject = Subject(stale(name), CPU)
    built = BuiltBatch(PagedFixture(subject, subject.base_spec(), DECODE.rows), DECODE, horizon=2)
    built.expect_attention("as built", cache="as built")
    built.advance()
    with pytest.raises(CheckFailure, match="after an advance"):
        built.expect_attention("after an advance")


@pytest.mark.parametrize("check", CHECKS)
def test_every_advance_check_catches_control(check: str) -> None:
    found = control(("triton_paged", check), CPU)
    assert found["built_right"] and found["caught"] and "step 0" not in found["first"]
