"""What the checks of vLLM's recurrent states find, and that each finds vLLM's earlier bugs where they are put back.

Needs vLLM's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for vLLM's own Triton kernels.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

from tests.engines.released import needs

pytestmark = [
    needs("vllm", "0.33"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="vLLM's kernels need TRITON_INTERPRET=1 here"),
    pytest.mark.usefixtures("vllm_inside"),
]
GATED = ["GDNAttentionMetadataBuilder", "KimiK3KDAMetadataBuilder"]
BY_ORDER = ["Mamba2AttentionMetadataBuilder", "ShortConvAttentionMetadataBuilder"]


@cache
def backend_of(name):
    from engine_kits.vllm import subjects

    return subjects([name])[0].backend


def verdict_of(name, play, change=lambda runner: None):
    """Serve the traffic of a play with an engine around the builder, after a change to it."""
    from engine_kits.state_traffic import serve

    backend = backend_of(name)
    runner = type(backend).engine(backend.plays[play].graphs)
    change(runner)
    return serve(runner, backend.plays[play].traffic)


def mark_rows_without_drafts(runner):
    """Pass -1 for rows that draft nothing, as runners did before vllm#56531."""
    builder = runner.group.get_metadata_builder(0)
    build = builder.build

    def marked(*args, num_decode_draft_tokens_cpu=None, **rest):
        drafts = num_decode_draft_tokens_cpu
        drafts = drafts if drafts is None else torch.where(drafts == 0, -1, drafts)
        return build(*args, num_decode_draft_tokens_cpu=drafts, **rest)

    builder.build = marked


def keep_count_of_last_owner(runner):
    """Leave a row's accepted count to its next owner, as before vllm#48132."""
    runner.model_state.add_request = lambda index, request: None


def run_padded_tails_as_prompts(runner):
    """Run a prompt's last token with its drafts, which are no tokens, as a prompt of them all: before vllm#55178."""
    prepare = runner.model_state.prepare_attn

    def as_prompts(batch, *args, **given):
        batch.prefill_runs_as_decode_np = None
        return prepare(batch, *args, **given)

    runner.model_state.prepare_attn = as_prompts


def run_first_tokens_as_decodes(runner):
    """Run a prompt's first chunk of one token as a decode, from the slot's last state, as before vllm#32118."""
    prepare = runner.model_state.prepare_attn

    def as_decodes(batch, *args, **given):
        if not given["for_capture"]:
            first = (batch.seq_lens[: batch.num_reqs] == 1).numpy() & (batch.num_scheduled_tokens == 1)
            batch.is_prefilling_np = batch.is_prefilling_np & ~first
        return prepare(batch, *args, **given)

    runner.model_state.prepare_attn = as_decodes


def copy_metadata(runner):
    """Build each batch's metadata in new memory, which a graph does not read."""
    builder = runner.group.get_metadata_builder(0)
    build = builder.build

    def copied(*args, **given):
        metadata = build(*args, **given)
        for name, part in vars(metadata).items():
            if isinstance(part, torch.Tensor):
                setattr(metadata, name, part.clone())
        return metadata

    builder.build = copied


def count_as_vllm(runner):
    """Count accepted tokens with vLLM's own kernel, in the interpreter."""

    def accept(steps, kept):
        indices = torch.tensor([runner.indices[step.request] for step in steps])
        ends = [step.request.done + len(step.tokens) >= step.request.prompt for step in steps]
        sampled = torch.tensor(ends) * (1 + torch.tensor(kept))
        runner.model_state.postprocess_state(indices, sampled.int())

    runner.accept = accept


def test_counts_equal_those_of_vllm():
    assert verdict_of(GATED[0], "mixed-v2_graph", count_as_vllm) == verdict_of(GATED[0], "mixed-v2_graph")


@pytest.mark.parametrize(
    ("change", "play", "name"),
    [
        (change, f"{traffic}-v2_graph", name)
        for change, traffic, names in (
            (keep_count_of_last_owner, "elsewhere", GATED + BY_ORDER),
            (mark_rows_without_drafts, "no_drafts", GATED),
            (run_padded_tails_as_prompts, "elsewhere", GATED + BY_ORDER),
            (run_first_tokens_as_decodes, "chunks", GATED + BY_ORDER),
        )
        for name in names
    ],
)
def test_earlier_bugs_are_found(change, play, name):
    assert verdict_of(name, play, change).wrong


@pytest.mark.parametrize("name", BY_ORDER)
def test_builders_by_order_ignore_the_mark(name):
    assert not verdict_of(name, "no_drafts-v2_graph", mark_rows_without_drafts).wrong


@pytest.mark.parametrize("name", GATED + BY_ORDER)
def test_metadata_in_new_memory_is_found(name):
    verdict = verdict_of(name, "verify-v2_graph", copy_metadata)
    assert verdict.moved and not verdict.wrong


@pytest.mark.parametrize("name", GATED + BY_ORDER)
def test_v1_replays_a_verification_for_prompts_of_its_shape(name):
    by_shape, by_state = (verdict_of(name, f"shaped_prompts-{runner}_graph") for runner in ("v1", "v2"))
    assert by_shape.wrong and by_shape.moved and by_shape.foreign
    assert not (by_state.wrong or by_state.moved or by_state.foreign)


@pytest.mark.parametrize("name", BY_ORDER)
def test_sorting_prompts_last_mends_the_requests_behind_them(name, monkeypatch):
    from vllm.v1.worker.gpu import model_runner

    play = "shaped_prompts_beside_no_drafts-v2_graph"
    assert verdict_of(name, play).wrong
    sort = model_runner.sort_batch_req_ids

    def decodes_first(lengths, drafts, width):
        return sorted(sort(lengths, drafts, width), key=lambda name: not drafts.get(name) and lengths[name] > 1)

    monkeypatch.setattr(model_runner, "sort_batch_req_ids", decodes_first)
    assert not verdict_of(name, play).wrong
