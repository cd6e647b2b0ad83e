"""FlashMLA's packages, as modules on disk with the entry points' signatures and no kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_backends import BrokenBackend, KVCache, registry
from attn_backends.flashmla_package import SPARSE, load_flashmla
from attn_backends.kernels.fp8_ds_mla import TOKEN_BYTES
from builders import AttentionKind, AttentionSpec, BatchError
from builders.flashmla_sparse import FlashMlaSchedule, FlashMlaSparseMetadata
from tests.attn_backends.packages_on_disk import packages_on_disk, versions
from tests.backends_over_stand_ins import unloaded
from tests.factories import CPU

OWN, VLLM = "flash_mla.flash_mla_interface", "vllm.third_party.flashmla.flash_mla_interface"
SOURCE = """
calls = []
def get_mla_metadata(*args, **kwargs):
    return object(), None
def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
        num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
        extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None):
    calls.append(dict(locals()))
    return q[..., :head_dim_v], q[..., 0].float()
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    calls.append(dict(locals()))
    return q[..., :d_v], q[..., 0].float(), q[..., 0].float()
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Installs a package's module; what is not installed is absent, and nobody has loaded the backends."""
    with (
        packages_on_disk(tmp_path, "flash_mla", "vllm") as on_disk,
        unloaded("attn_backends.flashmla", "attn_backends.flashmla_sparse"),
    ):
        yield lambda module, source=SOURCE: on_disk(module, source)


def make_spec(fp8: bool) -> AttentionSpec:
    return AttentionSpec(
        num_q_heads=64, num_kv_heads=1, head_dim=512, page_size=64, dtype=torch.bfloat16, sliding_window=128,
        kind=AttentionKind.MLA, kv_dtype=torch.float8_e4m3fn if fp8 else None,
    )  # fmt: skip


@pytest.mark.parametrize(("installed", "taken"), [([OWN], OWN), ([VLLM], VLLM), ([VLLM, OWN], OWN)])
def test_load_flashmla_prefers_its_own_package(installed: list[str], taken: str, install: Install) -> None:
    for module in installed:
        install(module)
    assert load_flashmla(SPARSE).__name__ == taken


def test_missing_flashmla_names_extra(install: Install) -> None:
    with pytest.raises(BrokenBackend, match=r"FlashMLA is not installed.*pip install '\.\[vllm\]' in a checkout"):
        registry.get("flashmla_sparse")


BROKEN = {
    "no sinks in decode": (
        SOURCE.replace("indices=None, attn_sink=None", "indices=None"),
        f"{OWN} is too old: its flash_mla_.* must accept .*attn_sink",
    ),
    "no sparse prefill": (
        SOURCE.replace("flash_mla_sparse_fwd", "flash_attn_varlen_func"),
        f"{OWN} is too old: its flash_mla_.* must accept .*attn_sink",
    ),
    "a build that does not load": (
        "raise ImportError('undefined symbol: _ZN3c10')",
        "installed but cannot be used: ImportError: undefined symbol: _ZN3c10",
    ),
}


@pytest.mark.parametrize(("source", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_package_raises_without_trying_other(source: str, words: str, install: Install) -> None:
    install(VLLM)
    install(OWN, source)
    with pytest.raises(BrokenBackend, match=words):
        registry.get("flashmla_sparse")


def test_dense_decode_rejects_old_release(install: Install) -> None:
    install(VLLM)
    with pytest.raises(BrokenBackend, match=f"{VLLM} is too old: its FlashMLASchedMeta must accept have_initialized"):
        registry.get("flashmla")


def make_metadata(schedule: object) -> FlashMlaSparseMetadata:
    return FlashMlaSparseMetadata(
        num_reqs=2, num_tokens=2, max_query_len=1, max_seq_len=2,
        query_start_loc=torch.arange(3, dtype=torch.int32), seq_lens=torch.ones(2, dtype=torch.int32),
        block_table=torch.zeros(2, 4, dtype=torch.int32), slot_mapping=torch.zeros(2, dtype=torch.int64),
        positions=torch.zeros(2, dtype=torch.int64), window_indices=torch.zeros(2, 128, dtype=torch.int32),
        window_lens=torch.ones(2, dtype=torch.int32), schedule=FlashMlaSchedule(2, schedule),
    )  # fmt: skip


QUERY = torch.zeros(2, 64, 512, dtype=torch.bfloat16)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("module", [OWN, VLLM])
def test_schedule_and_forward_call_the_same_module(module: str, fp8: bool, install: Install) -> None:
    install(module)
    backend, spec = registry.get("flashmla_sparse"), make_spec(fp8)
    builder = backend.builder(spec, CPU, max_reqs=2, max_tokens=2, max_seq_len=256)
    schedule = builder.make_schedule(2)
    page = torch.zeros(3, 64, 1, TOKEN_BYTES if fp8 else 512, dtype=torch.uint8 if fp8 else torch.bfloat16)
    metadata = make_metadata(schedule)
    out = backend.forward(QUERY, KVCache(page, page), metadata, spec=spec)

    calls = sys.modules[module].calls
    assert out.shape == (2, 64, 512) and len(calls) == (2 if fp8 else 1)
    assert torch.equal(calls[-1]["indices"], metadata.window_indices[:, None])
    assert all(call.get("is_fp8_kvcache", fp8) is fp8 for call in calls)
    assert not fp8 or (
        calls[0]["tile_scheduler_metadata"] is schedule and calls[1]["tile_scheduler_metadata"] is schedule
    )


def test_mismatched_inputs_rejected_before_kernel(install: Install) -> None:
    install(OWN)
    page = torch.zeros(3, 64, 1, 512, dtype=torch.bfloat16)
    with pytest.raises(BatchError, match="query"):
        registry.get("flashmla_sparse").forward(
            QUERY[:1], KVCache(page, page), make_metadata(None), spec=make_spec(fp8=False)
        )
    assert sys.modules[OWN].calls == []


@pytest.mark.parametrize(("heads", "reasons"), [(64, []), (128, []), (32, ["num_q_heads must be 64 or 128, got 32"])])
def test_only_kernel_head_counts_are_served(heads: int, reasons: list[str], install: Install) -> None:
    install(OWN)
    spec = replace(make_spec(fp8=True), num_q_heads=heads)
    assert registry.get("flashmla_sparse").unsupported_reasons(spec, CPU) == reasons


def test_bf16_cache_with_page_gaps_is_rejected(install: Install) -> None:
    install(OWN)
    padded = torch.zeros(3, 80, 1, 512, dtype=torch.bfloat16)[:, :64]
    with pytest.raises(BatchError, match=r"evenly spaced tokens, got strides \(40960, 512, 512, 1\): there are gaps"):
        registry.get("flashmla_sparse").forward(
            QUERY, KVCache(padded, padded), make_metadata(None), spec=make_spec(fp8=False)
        )
    assert sys.modules[OWN].calls == []


def test_bf16_cache_with_token_gaps_is_accepted(install: Install) -> None:
    install(OWN)
    wide = torch.zeros(3, 64, 1, 1024, dtype=torch.bfloat16)[..., :512]
    registry.get("flashmla_sparse").forward(QUERY, KVCache(wide, wide), make_metadata(None), spec=make_spec(fp8=False))
    (call,) = sys.modules[OWN].calls
    assert call["kv"].shape == (192, 1, 512) and call["kv"].stride(0) == 1024
    assert call["kv"].data_ptr() == wide.data_ptr()


LIBRARIES = {
    OWN: ("flash_mla/cuda.cpython-311-x86_64-linux-gnu.so", "tokenspeed-flashmla"),
    VLLM: ("vllm/_flashmla_C.abi3.so", "vllm"),
}


@pytest.mark.parametrize("module", LIBRARIES)
def test_version_is_of_loaded_package(module: str, install: Install, tmp_path: Path) -> None:
    library, package = LIBRARIES[module]
    install(module)
    (tmp_path / library).write_bytes(b"kernels")
    with versions({}):
        found = registry.get("flashmla_sparse").version
    assert found.startswith(f"{package} without its wheel's metadata ({Path(library).name.partition('.')[0]}.")
