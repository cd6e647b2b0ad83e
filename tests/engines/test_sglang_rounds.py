"""Controls of the kit over SGLang's draft backends: what the checks find in a broken copy, and pass in a mended one.

Needs SGLang's Python, such as `make engines` unpacks, and TRITON_INTERPRET=1 for SGLang's own Triton kernels.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.testing.outcome import CheckFailure

try:
    FOUND = version("sglang")
except PackageNotFoundError:
    FOUND = "none"
pytestmark = pytest.mark.skipif(FOUND != "0.5.23", reason=f"sglang 0.5.23 is not installed: found {FOUND}")
TRITON, FLASHINFER = "TritonMultiStepDraftBackend", "FlashInferMultiStepDraftBackend"
ATTEND, MEAN = "planned_rounds_attend_right", "planned_steps_mean_a_fresh_round"
ADDRESSES, DEVICE = "plans_keep_addresses", "plans_read_no_device"


class Tried:
    """A draft backend, changed by a function of SGLang's container or of the runner that it is made for."""

    def __init__(self, name, monkeypatch):
        from engines.sglang.conformance import subjects

        (self.subject,) = subjects([name])
        self.monkeypatch, self.builder = monkeypatch, self.subject.backend.builder

    def with_steps(self, change):
        make = self.builder.make

        def changed(runner):
            change(steps := make(runner))
            return steps

        self.monkeypatch.setattr(self.builder, "make", staticmethod(changed))
        return self

    def with_runner(self, change):
        make = self.builder.make

        def changed(runner):
            change(runner)
            return make(runner)

        self.monkeypatch.setattr(self.builder, "make", staticmethod(changed))
        return self

    def with_plan(self, change):
        """change: called after each plan with the container and SGLang's batch."""

        def replace(steps):
            plan = steps.init_forward_metadata_out_graph

            def planned(batch, in_capture=False):
                plan(batch, in_capture=in_capture)
                change(steps, batch)

            steps.init_forward_metadata_out_graph = planned

        return self.with_steps(replace)

    def check(self, what, case="base-round"):
        from spec_decode.conformance.check import expand

        (found,) = (each for each in expand(self.subject) if each.id == f"graph.{what}[{case}]")
        with torch_implementations():
            return found()

    def failure(self, what, case="base-round"):
        with pytest.raises(CheckFailure) as raised:
            self.check(what, case)
        return str(raised.value)


@pytest.fixture
def tried(monkeypatch):
    return lambda name: Tried(name, monkeypatch)


def all_as_the_first(steps, batch):
    """Every step of Triton's or FlashInfer's is planned as the first."""
    steps.kv_indptr[1:].copy_(steps.kv_indptr[0].clone())
    steps.cuda_graph_kv_indices[1:].copy_(steps.cuda_graph_kv_indices[0].clone())


@pytest.mark.parametrize("name", [TRITON, FLASHINFER])
def test_steps_that_are_planned_as_the_first_are_found(tried, name):
    mutant = tried(name).with_plan(all_as_the_first)
    assert "step 1 of a round over 'as_large'" in mutant.failure(ATTEND)
    assert "step 1 of a round over 'as_large': field kv_indptr" in mutant.failure(MEAN)


def test_a_page_of_another_request_is_found(tried):
    def exchange(steps, batch):
        slots, ends = steps.cuda_graph_kv_indices[2], steps.kv_indptr[2].tolist()
        slots[ends[1]] = slots[ends[3]]

    mutant = tried(TRITON).with_plan(exchange)
    assert "step 2 of a round over 'as_large'" in mutant.failure(ATTEND)
    assert "step 2 of a round over 'as_large': field kv_indices" in mutant.failure(MEAN)


def test_a_plan_for_too_little_work_is_found(tried):
    def shorten(steps, batch):
        (wrapper,) = steps.attn_backends[3].forward_metadata.decode_wrappers
        wrapper.planned[1:] -= 1

    mutant = tried(FLASHINFER).with_plan(shorten)
    assert "step 3 of a round over 'as_large'" in mutant.failure(ATTEND)
    assert "step 3 of a round over 'as_large': field planned" in mutant.failure(MEAN)


def test_metadata_that_a_plan_replaces_is_found(tried):
    def replace(steps, batch):
        for step in steps.attn_backends:
            step.forward_metadata = type(step.forward_metadata)(**{
                name: value.clone() if name == "kv_indices" else value
                for name, value in vars(step.forward_metadata).items()
            })  # fmt: skip

    assert "['kv_indices'] replaced" in tried(TRITON).with_plan(replace).failure(ADDRESSES)


def test_a_plan_that_reads_the_device_is_found(tried):
    mutant = tried(TRITON).with_plan(lambda steps, batch: batch.seq_lens.max().item())
    assert "reads the device from the host" in mutant.failure(DEVICE)


def test_a_window_of_one_more_token_mends_tritons(tried):
    """SGLang's number, which leaves the query's own token out, is what its decode kernels are given."""

    def widen(runner):
        runner.sliding_window_size += 1

    assert "step 0 of a round over 'as_large'" in tried(TRITON).failure(ATTEND, "window-round")
    tried(TRITON).with_runner(widen).check(ATTEND, "window-round")
