"""Controls of the kit over SGLang's draft backends: broken copies are caught, repaired ones pass.

Needs SGLang's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for SGLang's own Triton kernels.
"""

from __future__ import annotations

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.testing.outcome import CheckFailure
from tests.engines.released import needs

pytestmark = needs("sglang", "0.5.23")
TRITON, FLASHINFER = "TritonMultiStepDraftBackend", "FlashInferMultiStepDraftBackend"
FLASH_ATTENTION, FLASHMLA = "FlashAttentionMultiStepBackend", "FlashMLAMultiStepDraftBackend"
TRTLLM_MLA, FLASHINFER_MLA = "TRTLLMMLAMultiStepDraftBackend", "FlashInferMLAMultiStepDraftBackend"
DSA, DSV4 = "DeepseekSparseAttnMultiStepBackend", "DeepseekV4MultiStepBackend"
ATTEND, TOKENS = "planned_rounds_attend_right", "planned_steps_have_their_tokens"
MEAN = "planned_steps_mean_a_fresh_round"
ADDRESSES, DEVICE = "plans_keep_addresses", "plans_read_no_device"


class ModifiedBackend:
    """A draft backend, changed by a function of SGLang's container or of the runner that it is made for."""

    def __init__(self, name, monkeypatch):
        from engine_kits.sglang import subjects

        (self.subject,) = subjects([name])
        self.monkeypatch, self.builder = monkeypatch, self.subject.backend.builder

    def remade(self, *, runner=lambda runner: None, steps=lambda steps: None):
        make = self.builder.make

        def changed(given):
            runner(given)
            container = make(given)
            steps(container)
            return container

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

        return self.remade(steps=replace)

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
def modified(monkeypatch):
    return lambda name: ModifiedBackend(name, monkeypatch)


def all_as_the_first(steps, batch):
    """Every step of Triton's or FlashInfer's is planned as the first."""
    steps.kv_indptr[1:].copy_(steps.kv_indptr[0].clone())
    steps.cuda_graph_kv_indices[1:].copy_(steps.cuda_graph_kv_indices[0].clone())


def a_page_of_another_request(steps, batch):
    slots, ends = steps.cuda_graph_kv_indices[2], steps.kv_indptr[2].tolist()
    slots[ends[1]] = slots[ends[3]]


def too_little_work(steps, batch):
    (wrapper,) = steps.attn_backends[3].forward_metadata.decode_wrappers
    wrapper.planned[1:] -= 1


FIRST = {ATTEND: "", TOKENS: ": request 0 has", MEAN: ": field kv_indptr"}


@pytest.mark.parametrize(
    ("name", "plan", "step", "differences"),
    [
        (TRITON, all_as_the_first, 1, FIRST),
        (FLASHINFER, all_as_the_first, 1, FIRST),
        (TRITON, a_page_of_another_request, 2, {**FIRST, TOKENS: ": request 1 has its", MEAN: ": field kv_indices"}),
        (FLASHINFER, too_little_work, 3, {ATTEND: "", MEAN: ": field planned"}),
    ],
)
def test_wrong_plan_fails_at_its_step(modified, name, plan, step, differences):
    mutant = modified(name).with_plan(plan)
    for what, more in differences.items():
        assert f"step {step} of a round over 'as_large'{more}" in mutant.failure(what)


def test_flash_attention_steps_all_first_fail_checks(modified):
    def forget(steps):
        for step in steps.attn_backends:
            step.speculative_step_id = 0

    mutant = modified(FLASH_ATTENTION).remade(steps=forget)
    assert "step 1 of a round over 'as_large'" in mutant.failure(ATTEND)
    assert "request 0 has the tokens before the step and the step's own; expected: 3 tokens" in mutant.failure(TOKENS)
    assert "step 1 of a round over 'as_large': field cache_seqlens_int32" in mutant.failure(MEAN)


def test_metadata_replaced_by_plan_fails_check(modified):
    def replace(steps, batch):
        for step in steps.attn_backends:
            step.forward_metadata = type(step.forward_metadata)(**{
                name: value.clone() if name == "kv_indices" else value
                for name, value in vars(step.forward_metadata).items()
            })  # fmt: skip

    assert "['kv_indices'] replaced" in modified(TRITON).with_plan(replace).failure(ADDRESSES)


def test_plan_reading_device_fails_check(modified):
    mutant = modified(TRITON).with_plan(lambda steps, batch: batch.seq_lens.max().item())
    assert "reads device data on the host" in mutant.failure(DEVICE)


def test_window_of_one_more_token_repairs_triton(modified):
    """SGLang's number, which leaves the query's own token out, is what its decode kernels are given."""

    def widen(runner):
        runner.sliding_window_size += 1

    assert "step 0 of a round over 'as_large'" in modified(TRITON).failure(ATTEND, "window-round")
    modified(TRITON).remade(runner=widen).check(ATTEND, "window-round")


MISSED = "request 0 has the tokens before the step and the step's own; expected: 2 tokens; got: 1 tokens"


@pytest.mark.parametrize("name", [FLASHMLA, TRTLLM_MLA, FLASHINFER_MLA, DSA, DSV4])
def test_lengths_that_do_not_advance_fail_check(modified, name):
    assert f"step 0 of a round over 'as_large': {MISSED}" in modified(name).failure(TOKENS)


def test_flashmla_planned_per_step_passes(modified, monkeypatch):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

    lengths = {}

    def plan(steps, batch):
        for i, step in enumerate(steps.attn_backends):
            own = lengths.setdefault((id(steps), i), torch.zeros_like(batch.seq_lens))
            own.copy_(batch.seq_lens + i + 1)
            view = build_inner_fb_view(batch, bs=batch.batch_size, forward_mode=ForwardMode.DECODE)
            view.seq_lens, view.seq_lens_cpu = own, None
            step.init_forward_metadata_out_graph(view)

    mended = modified(FLASHMLA).with_plan(plan)
    as_it_is = mended.builder.step

    def step(self, rows, i):
        planned = as_it_is(self, rows, i)
        planned.batch.seq_lens = lengths[id(self.steps), i]
        return planned

    monkeypatch.setattr(mended.builder, "step", step)
    for what in (ATTEND, TOKENS, MEAN):
        mended.check(what)


def plan_trtllm(step, batch, lengths, offsets):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    step._apply_cuda_graph_metadata(None, batch.batch_size, batch.req_pool_indices, lengths, ForwardMode.DECODE)


def plan_flashinfer(step, batch, lengths, offsets):
    step.forward_metadata.decode_wrapper._plan(None, None, None, None, offsets, offsets.diff())


def plan_sparse_attention(step, batch, lengths, offsets):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    more = None, ForwardMode.DECODE, batch.spec_info
    step._apply_cuda_graph_metadata(batch.batch_size, batch.req_pool_indices, lengths, *more)


def plan_deepseek_v4(step, batch, lengths, offsets):
    raw = step.forward_metadata
    if raw.seq_lens.data_ptr() == batch.seq_lens.data_ptr():
        raw.seq_lens = raw.seq_lens.clone()
    raw.seq_lens.copy_(lengths)


@pytest.mark.parametrize(
    ("name", "plan_step", "checks"),
    [
        (TRTLLM_MLA, plan_trtllm, (ATTEND, TOKENS, MEAN)),
        (FLASHINFER_MLA, plan_flashinfer, (ATTEND, TOKENS, MEAN)),
        (DSA, plan_sparse_attention, (TOKENS, MEAN)),
        (DSV4, plan_deepseek_v4, (TOKENS, MEAN)),
    ],
)
def test_steps_planned_for_own_lengths_pass(modified, name, plan_step, checks):
    def plan(steps, batch):
        # The last of DeepSeek V4's is never run.
        for i, step in enumerate(steps.attn_backends[: -1 if name == DSV4 else None]):
            offsets = steps.kv_indptr[i, : batch.batch_size + 1] if name == FLASHINFER_MLA else None
            plan_step(step, batch, batch.seq_lens + i + 1, offsets)

    mended = modified(name).with_plan(plan)
    for what in checks:
        mended.check(what)


def test_flashinfer_mla_plan_starts_in_previous_request(modified):
    from engine_kits.sglang.round_checks import _ROUND
    from spec_decode.testing.batches import Case
    from spec_decode.testing.paged_fixture import PagedFixture

    subject = modified(FLASHINFER_MLA).subject

    with torch_implementations():
        case = Case(subject.base_spec(), _ROUND)
        fixture = PagedFixture(subject, case.spec, _ROUND.rows)
        builder = fixture.builder()
        view = fixture.view(fixture.load(_ROUND), _ROUND)
        builder.plan_capture(_ROUND.rows)
        builder.plan(view)
        second = builder.step(_ROUND.rows, 0).slots()[1]
        own = fixture.pages[1][0] + 1
        assert second[0] // case.spec.page_size == fixture.pages[0][0] + 1, "a slot of request 0"
        assert all(slot // case.spec.page_size == own for slot in second[1:])


def test_sparse_attention_keeps_captured_schedule(modified):
    """A copy that refreshes them, as SGLang does for the others, fails at its lengths alone."""

    def refresh(steps, batch):
        for step in steps.attn_backends:
            step._refresh_paged_mqa_schedule_metadata(metadata := step.forward_metadata, metadata.paged_mqa_ctx_lens_2d)
            step._refresh_topk_v2_plan(metadata)

    assert "step 0 of a round over 'as_large': field paged_mqa_schedule_metadata" in modified(DSA).failure(MEAN)
    refreshed = modified(DSA).with_plan(refresh).failure(MEAN)
    assert "step 1 of a round over 'as_large': field cache_seqlens_int32" in refreshed
