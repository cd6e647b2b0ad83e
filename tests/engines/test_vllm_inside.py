"""The plug-in inside vLLM 0.33's own classes, as installed: no engine, model or GPU, and a stand-in for FlashInfer.

Needs vLLM's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for vLLM's own Triton kernels.
"""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from attn_backends import registry
from attn_backends.engines import vllm as plug_in
from attn_backends.engines.vllm import compat
from attn_backends.engines.vllm.compat import v0_33
from tests.builders.flashinfer.host_planner import read_plan
from tests.engines import vllm_flashinfer
from tests.engines.vllm_draft_loop import LENS, DraftLoop
from tests.engines.vllm_runner import (
    DIM,
    HEADS,
    KV_HEADS,
    LATENT,
    NEEDS_VLLM,
    PAGE,
    PAGED,
    SPARSE,
    TOKENS,
    WIDTH,
    Runner,
    assert_attends,
    backend_of,
    default_dtype,
    make_runner,
    select,
)

pytestmark = NEEDS_VLLM
DENSE = (*PAGED, *LATENT)
DECODE, BLOCK = {"query_len": 1}, {"query_len": 1 + TOKENS, "causal": False}
"""Shapes of a batch: one token a request, and a block of draft tokens."""
READ = "import pickle, sys; print(*(f'{each.name}:{each.get_path()}' for each in pickle.load(sys.stdin.buffer)))"


@pytest.mark.parametrize("name", plug_in.NAMES)
def test_backend_class_reports_its_vllm_name(name):
    assert backend_of(name).get_name() == name


@pytest.mark.parametrize("name", DENSE)
def test_metadata_has_slots_as_all_of_vllms(name):
    runner = make_runner(name)
    runner.fill([5])
    common = runner.common()
    assert runner.builder.build(0, common).slot_mapping.data_ptr() == common.slot_mapping.data_ptr()


@pytest.mark.parametrize("name", [name for name in plug_in.NAMES if "FLASH_ATTN3" in name or name.endswith("FLASHMLA")])
def test_missing_kernels_raise_import_error(name, monkeypatch):
    ours = name.removeprefix("ATTN_BACKENDS_").lower()
    monkeypatch.delitem(registry._loaded, ours)
    with pytest.raises(ImportError, match=f"backend '{ours}' .* does not load"):
        backend_of(name)


def test_forked_worker_registers_again():
    child = os.fork()
    if child == 0:
        plug_in.register()
        os._exit(backend_of(PAGED[0]).get_name() != PAGED[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_spawned_process_unpickles_names_before_plug_ins():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plug_in.register()
    configured = [AttentionBackendEnum[name] for name in (*plug_in.NAMES, "FLASH_ATTN")]
    assert copy.deepcopy(configured) == configured
    # As `vllm serve` starts its engine, and an engine its workers.
    child = subprocess.run(
        [sys.executable, "-c", READ],
        input=bytes(ForkingPickler.dumps(configured)),
        stdout=subprocess.PIPE,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout.decode().split() == [f"{each.name}:{each.get_path()}" for each in configured]


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {}) for name in plug_in.NAMES), *((name, {"use_non_causal": True}) for name in DENSE)],
)
def test_vllm_selects_a_backend_by_its_name(name, changes):
    assert select(name, **changes) == plug_in.NAMES[name]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (name, changes, reason)
        for names, changes, reason in (
            (plug_in.NAMES, {"use_dcp": True}, "DCP not supported"),
            (plug_in.NAMES, {"use_pcp": True}, "PCP not supported"),
            (plug_in.NAMES, {"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
            (plug_in.NAMES, {"dtype": torch.float32}, "dtype not supported"),
            (plug_in.NAMES, {"block_size": 8}, "block_size not supported"),
            (DENSE[1:], {"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
            (DENSE, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
            (DENSE, {"use_sparse": True}, "sparse not supported"),
            (PAGED, {"attn_type": "encoder"}, "attention type encoder not supported"),
            (PAGED, {"use_mla": True}, "MLA not supported"),
            (PAGED[:2], {"kv_cache_dtype": "float16"}, "must have the dtype of the queries, .*, got torch.float16"),
            (PAGED[:1], {"head_size": 40}, "head_dim must be 64 to 256, a multiple of 8, got 40"),
            (PAGED[1:2], {"head_size": 512}, "head_size not supported"),
            (PAGED[1:2], {"has_sink": True}, "attention sinks not supported"),
            ((*PAGED[1:2], *LATENT[1:], SPARSE), {"use_batch_invariant": True}, "batch invariance not supported"),
            ((*LATENT, SPARSE), {"use_mla": False}, "non-MLA not supported"),
            (LATENT[:1], {"head_size": 1088}, "head_size not supported"),
            ((*LATENT[1:], SPARSE), {"head_size": 512}, "head_size not supported"),
            ((*LATENT[1:], SPARSE), {"dtype": torch.float16}, "dtype not supported"),
            ((LATENT[2], SPARSE), {"block_size": 32}, "block_size not supported"),
            ([SPARSE], {"use_sparse": False}, "non-sparse not supported"),
            ([SPARSE], {"kv_cache_dtype": "fp8"}, "must be fp8_ds_mla, got fp8; use --kv-cache-dtype fp8_ds_mla"),
            ([SPARSE], {"kv_cache_dtype": "nvfp4_ds_mla"}, "must be fp8_ds_mla, got nvfp4_ds_mla"),
            ([SPARSE], {"use_non_causal": True}, "non-causal attention not supported"),
        )
        for name in names
    ],
)
def test_vllm_shows_the_reason_against_a_model(name, changes, reason):
    with pytest.raises(ValueError, match=f"is not valid for this configuration.*{reason}"):
        select(name, **changes)


def test_sparse_latents_are_served_in_fp8_too():
    assert select(SPARSE, kv_cache_dtype="fp8_ds_mla")


@pytest.mark.parametrize("name", plug_in.NAMES)
def test_backend_is_offered_on_its_compute_capabilities(name):
    from vllm.platforms.interface import DeviceCapability

    of_triton = name in (PAGED[0], LATENT[0])
    served = {(7, 5): False, (8, 0): of_triton or name == PAGED[1], (9, 0): True, (10, 0): of_triton}
    assert {each: backend_of(name).supports_compute_capability(DeviceCapability(*each)) for each in served} == served


@pytest.mark.parametrize("name", v0_33.PLACES)
def test_the_released_vllm_has_every_name(name):
    assert getattr(compat, name) is not None


def test_missing_flashinfer_names_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "attn_backends.engines.vllm.flashinfer", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.flashinfer", None)

    with pytest.raises(ImportError, match=r"FLASHINFER_IN_GRAPH needs FlashInfer.*pip install 'vllm==0\.33\.\*'"):
        importlib.import_module("attn_backends.engines.vllm.flashinfer")


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({"alibi_slopes": [0.5]}, "has no alibi_slopes"),
        ({"attn_type": "encoder_only"}, "has no attn_type, the layer has 'encoder_only'"),
        ({"kv_sharing_target_layer_name": "model.0"}, "has no kv_sharing_target_layer_name"),
        ({"block_m": 64}, "has no block_m, the layer has 64"),
    ],
)
def test_unsupported_layer_option_is_rejected_at_creation(extras, reason):
    with default_dtype(torch.bfloat16), pytest.raises(ValueError, match=f"{reason}.*vLLM was not started"):
        backend_of(PAGED[0]).get_impl_cls()(HEADS, DIM, 0.125, KV_HEADS, **extras)


@pytest.mark.parametrize("changed", [{"alibi_slopes": [0.5] * HEADS}, {"kv_sharing_target_layer_name": "model.0"}])
def test_flashinfer_layer_with_untested_option_is_rejected(changed):
    from vllm.config import set_current_vllm_config

    layer = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **changed}
    with (
        set_current_vllm_config(Runner(PAGED[1]).config),
        pytest.raises(ValueError, match="supports neither ALiBi nor a KV"),
    ):
        backend_of(PAGED[1]).get_impl_cls()(HEADS, DIM, 0.125, KV_HEADS, **layer)


@pytest.mark.parametrize("kind", ["ChunkedLocalAttentionSpec", "SinkFullAttentionSpec"])
@pytest.mark.parametrize("name", PAGED)
def test_layers_with_rewritten_batches_are_rejected_at_startup(name, kind):
    from vllm.v1 import kv_cache_interface
    from vllm.v1.attention.backend import subclass_attention_backend
    from vllm.v1.worker.utils import customize_attention_spec

    # The builder, which vLLM wraps for such layers, plays no part here.
    backend = subclass_attention_backend("Wrapped", backend_of(name), backend_of(name).get_builder_cls())
    shape = {"block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": DIM, "dtype": torch.bfloat16}
    own = {"attention_chunk_size": 64} if kind == "ChunkedLocalAttentionSpec" else {"sink_len": PAGE}
    with pytest.raises(
        ValueError, match=f"{name} supports neither chunked local .* nor static sink tokens, .* a {kind}"
    ):
        customize_attention_spec(backend, getattr(kv_cache_interface, kind)(**shape, **own))


@pytest.mark.parametrize("name", PAGED)
def test_uniform_batches_have_full_graphs(name):
    from vllm.v1.attention.backend import AttentionCGSupport

    runner = Runner(name)
    support = type(runner.builder).get_cudagraph_support(runner.config, runner.group.kv_cache_spec)
    assert support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("query_len", [1, 1 + TOKENS])
@pytest.mark.parametrize("name", DENSE)
def test_a_build_attends_right(name, query_len):
    runner = make_runner(name, query_len)
    for seed, lens in enumerate(LENS):
        runner.fill(lens, seed)
        assert_attends(runner, runner.group.build_metadata(runner.common()), lens)


@pytest.mark.parametrize("query_len", [1, 1 + TOKENS])
@pytest.mark.parametrize("kv", ["fp8", "fp8_e4m3"])
def test_a_build_attends_right_over_8_bits(kv, query_len):
    assert select(PAGED[0], kv_cache_dtype=kv) == plug_in.NAMES[PAGED[0]]
    runner = Runner(PAGED[0], query_len, kv=kv)
    for seed, lens in enumerate(LENS):
        runner.fill(lens, seed)
        assert_attends(runner, runner.group.build_metadata(runner.common()), lens)


@pytest.mark.parametrize("name", DENSE)
def test_speculator_replays_draft_loop_over_new_batches(name):
    loop = DraftLoop(make_runner(name))
    assert loop.speculator.supports_decode_metadata_update
    loop.assert_right()


@pytest.mark.parametrize("name", PAGED)
def test_head_count_is_per_rank(name):
    runner = Runner(name, ranks=2)
    assert runner.config.model_config.get_num_kv_heads(runner.config.parallel_config) == 2 * KV_HEADS
    runner.fill([5, 150, 33])
    assert_attends(runner, runner.group.build_metadata(runner.common()), [5, 150, 33])


@pytest.mark.parametrize("name", PAGED)
def test_kernel_block_table_is_read_as_mapped(name):
    runner = Runner(name, block=2 * PAGE)
    assert runner.group.kernel_block_table is not None
    runner.fill([5, 150, 33])
    mapped = runner.group.map_to_kernel_block_table(runner.table[:, : WIDTH // 2])
    assert mapped.stride(0) > mapped.shape[1]
    metadata = runner.builder.build(0, runner.common().replace(block_table_tensor=mapped))
    runner.table[:, :WIDTH] = mapped
    runner.cache = runner.cache.repeat(2, 1, 1, 1)
    assert_attends(runner, metadata, [5, 150, 33])


def test_common_prefix_is_rejected():
    from builders import BatchError

    runner = Runner(PAGED[0])
    runner.fill([5, 150])
    with pytest.raises(BatchError, match="no cascade attention, got a common prefix of 16 tokens"):
        runner.builder.build(16, runner.common())


def test_batch_invariance_follows_vllm_setting(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert select(PAGED[0], use_batch_invariant=True)
    assert Runner(PAGED[0]).layer.impl.spec(PAGE).batch_invariant


@pytest.mark.parametrize("order", [1, -1])
def test_windowed_and_full_layers_share_a_group(order, monkeypatch):
    """As vLLM groups them without its hybrid KV cache manager. If batch-invariant, a window has a single split."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    whole, windowed = Runner(PAGED[0]), Runner(PAGED[0], window=16)
    layers = {"whole": whole.layer, "windowed": windowed.layer}
    whole.config.compilation_config.static_forward_context = layers
    whole.group.layer_names = [*layers][::order]
    whole.remake()
    for runner in (whole, windowed):
        runner.fill([5, 150, 33])
        assert_attends(runner, whole.group.build_metadata(runner.common()), [5, 150, 33])


def test_graph_is_captured_for_longest_engine_request():
    runner = Runner(PAGED[0])
    runner.fill([5, 7])
    metadata = runner.group.build_metadata_for_cudagraph_capture(runner.common().replace(max_seq_len=8))
    assert metadata.ours.max_seq_len == runner.config.model_config.max_model_len


def test_keys_and_values_are_written_in_vllm_layout():
    runner = Runner(PAGED[0])
    key, value = torch.randn(2, 2, KV_HEADS, DIM).bfloat16()
    runner.layer.impl.do_kv_cache_update(runner.layer, key, value, runner.cache, torch.tensor([3 * PAGE + 7, -1]))
    assert torch.equal(runner.cache[3, :, 7], torch.cat([key[0], value[0]], -1))


def test_keys_and_values_are_written_in_8_bits_over_the_layers_scales():
    runner = Runner(PAGED[0], kv="fp8")
    key, value = torch.randn(2, 1, KV_HEADS, DIM).bfloat16() * 300
    runner.layer.impl.do_kv_cache_update(runner.layer, key, value, runner.cache, torch.tensor([3 * PAGE + 7]))
    found = runner.cache[3, :, 7].view(torch.float8_e4m3fn).float()
    wanted = torch.cat([key[0].float() / 0.7, value[0].float() / 3.0], -1).clamp(-448, 448)
    torch.testing.assert_close(found, wanted, rtol=2**-4, atol=2**-9)
    assert found.abs().max() == 448


def test_sinks_reload_in_place_in_model_dtype():
    runner = Runner(PAGED[0])
    sinks = torch.nn.Parameter(torch.full((HEADS,), -100.0, dtype=torch.bfloat16))
    with default_dtype(torch.bfloat16):
        impl = runner.layer.impl = backend_of(PAGED[0]).get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, sinks=sinks)
    impl.process_weights_after_loading(torch.bfloat16)
    runner.remake()
    runner.fill([5, 150, 33])
    metadata = runner.group.build_metadata(runner.common())
    assert_attends(runner, metadata, [5, 150, 33])  # a sink that weighs nothing

    read = impl.sinks.data_ptr()
    sinks.data.fill_(100)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.sinks.data_ptr() == read
    out = runner.attend(metadata, torch.randn(runner.ROWS, HEADS, DIM).bfloat16())
    torch.testing.assert_close(out, torch.zeros_like(out), atol=1e-6, rtol=0)


def test_memory_profiling_runs_without_metadata():
    runner = Runner(PAGED[0])
    assert not runner.attend(None, torch.randn(3, HEADS, DIM)).any()


@pytest.mark.parametrize(("shape", "plans"), [(DECODE, ["decode"]), (BLOCK, ["prefill", "block"])], ids=str)
def test_flashinfer_plans_each_shape_once_on_host(shape, plans):
    runner = Runner(PAGED[1], **shape)
    for seed in range(5):
        runner.fill([5 + seed, 150], seed)
        runner.group.build_metadata(runner.common())
    assert plans == vllm_flashinfer.HOST_PLANS


def test_plan_matches_flashinfer_for_current_lengths():
    runner, fresh = Runner(PAGED[1]), Runner(PAGED[1])
    runner.fill([3] * 8)
    runner.group.build_metadata(runner.common())
    for seed, lens in enumerate([LENS[0], [190] * 8]):
        runner.fill(lens, seed)
        fresh.fill(lens, seed)
        plan = runner.group.build_metadata(runner.common()).plan
        theirs = super(type(fresh.builder), fresh.builder).build(0, fresh.common()).decode.wrapper
        assert read_plan(plan.workspace, plan.layout) == read_plan(theirs._int_workspace_buffer, plan.layout)


@pytest.mark.parametrize("shape", [DECODE, BLOCK], ids=str)
def test_build_never_writes_vllm_block_table(shape):
    """A wrapper that is bound to it must never be planned on the host again: that would copy pages into it."""
    runner = Runner(PAGED[1], **shape)
    runner.fill([5, 150, 33])
    before = runner.table.clone()
    elsewhere = runner.common().replace(seq_lens=runner.seq_lens.clone(), block_table_tensor=runner.table.clone())
    for common in (runner.common(), elsewhere, runner.common()):
        runner.builder.build(0, common)
    assert torch.equal(runner.table, before)


def test_two_sets_of_buffers_have_separate_plans():
    runner = Runner(PAGED[1])
    runner.fill([5, 150, 33])
    here = runner.builder.build(0, runner.common())
    other = runner.common().replace(seq_lens=runner.seq_lens.clone())
    there = runner.builder.build(0, other)
    other.seq_lens[:3] = torch.tensor([20, 20, 20])
    runner.builder.update_draft_decode_metadata(there)
    runner.builder.update_draft_decode_metadata(here)
    assert here.decode.wrapper is not there.decode.wrapper
    assert_attends(runner, here, [5, 150, 33])
    assert_attends(runner, there, [20, 20, 20])


def test_batch_with_prefill_is_planned_by_vllm():
    runner = Runner(PAGED[1])
    runner.fill([5, 150])
    common = runner.common(rows=2).replace(
        query_start_loc=torch.tensor([0, 1, 21], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1, 21], dtype=torch.int32),
        num_actual_tokens=21,
        max_query_len=20,
    )
    metadata = runner.builder.build(0, common)
    assert metadata.plan is None and metadata.num_prefills == 1
    assert "prefill" in vllm_flashinfer.HOST_PLANS


def test_flashinfer_without_full_graphs_does_not_update(monkeypatch):
    from vllm.config import CUDAGraphMode

    runner = Runner(PAGED[1])
    monkeypatch.setattr(runner.config.compilation_config, "cudagraph_mode", CUDAGraphMode.NONE)
    runner.remake()
    assert runner.builder.reasons == ["full graphs are off"]
    assert not runner.group.supports_draft_decode_metadata_update


@pytest.mark.parametrize("shape", [DECODE, BLOCK], ids=str)
def test_flashinfer_drops_plans_if_graphs_turn_off_later(shape, monkeypatch):
    """vLLM can turn full graphs off after it made the builders."""
    from vllm.config import CUDAGraphMode

    runner = Runner(PAGED[1], **shape)
    monkeypatch.setattr(runner.config.compilation_config, "cudagraph_mode", CUDAGraphMode.PIECEWISE)
    for rows in (1, 2, 3):
        runner.fill([25, 150, 33][:rows])
        metadata = runner.builder.build(0, runner.common(rows))
        runner.seq_lens[:rows] += 1
        runner.builder.update_draft_decode_metadata(metadata)
        assert_attends(runner, metadata, [26, 151, 34][:rows], rows=rows)
    assert not runner.builder._plans and not runner.builder._decode_wrappers_cudagraph


@pytest.mark.parametrize(
    ("name", "block", "page"),
    [
        *((PAGED[2], block, 64) for block in (64, 128)),
        *((LATENT[1], block, 32) for block in (32, 64)),
        *((LATENT[2], block, 64) for block in (64, 128)),
        (LATENT[0], 48, 48),
    ],
)
def test_vllm_splits_blocks_into_kernel_pages(name, block, page):
    from vllm.v1.worker.utils import select_common_block_size

    assert select_common_block_size(block, [backend_of(name)]) == page
