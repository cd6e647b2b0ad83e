"""The kit over vLLM's builders, as far as it runs without vLLM: `make engines` runs it over them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attn_backends import AttentionBackend
from builders import AttentionKind, AttentionSpec
from engine_kits.engine_cache import NoAttention, with_null_page
from engine_kits.vllm.forwards import Latents, PackedHeads, WindowLists

HEADS = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
LATENTS = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=128, page_size=16, kind=AttentionKind.MLA)
DENSE = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=128, value_dim=64, page_size=16, kind=AttentionKind.MLA)
FP8_DS_MLA = AttentionSpec(
    num_q_heads=4, num_kv_heads=1, head_dim=512, page_size=16, kind=AttentionKind.MLA, kv_dtype=torch.float8_e4m3fn
)


def backend_of(kind: type[AttentionBackend]) -> AttentionBackend:
    return type(kind.__name__, (kind,), {"name": "it"})()


@pytest.mark.parametrize(
    ("kind", "spec"),
    [(PackedHeads, HEADS), (NoAttention, LATENTS), (NoAttention, FP8_DS_MLA)],
    ids=["heads", "mla", "fp8"],
)
def test_pages_follow_a_null_block_of_nan(kind: type[AttentionBackend], spec: AttentionSpec) -> None:
    cache = backend_of(kind).allocate_kv(spec, 3, torch.device("cpu"))
    blocks = with_null_page(cache)

    assert (cache.num_pages, blocks.num_pages) == (3, 4)
    for pages, every in ((cache.key, blocks.key), (cache.value, blocks.value)):
        assert every[1:].data_ptr() == pages.data_ptr() and every[1:].stride() == pages.stride()
        null = every[0].view(torch.float8_e4m3fn) if spec is FP8_DS_MLA else every[0]
        assert null.float().isnan().all()


@pytest.mark.parametrize(
    ("kind", "spec"),
    [(PackedHeads, HEADS), (Latents, DENSE), (WindowLists, LATENTS)],
    ids=["heads", "latents", "window"],
)
def test_token_seeing_only_itself_gets_its_value(kind: type[AttentionBackend], spec: AttentionSpec) -> None:
    """In block 1 of vLLM, which is the kit's first page."""
    backend = backend_of(kind)
    cache = backend.allocate_kv(spec, 2, torch.device("cpu"))
    block = torch.tensor([[1]], dtype=torch.int32)
    length = torch.ones(1, dtype=torch.int32)
    metadata = SimpleNamespace(
        num_tokens=1, max_query_len=1, max_seq_len=16, slot_mapping=torch.tensor([16]),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        block_table=block, seq_lens=length, decode_block_table=block, decode_seq_lens=length,
        decode_swa_indices=torch.tensor([[[16]]], dtype=torch.int32), decode_swa_lens=length,
    )  # fmt: skip
    key = torch.randn(1, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype)
    value = torch.randn_like(key) if kind is PackedHeads else key[..., : spec.out_dim]
    query = torch.randn(1, spec.num_q_heads, spec.head_dim, dtype=spec.dtype)

    backend.write_kv(key, value, cache, metadata)
    out = backend.forward(query, cache, metadata, spec=spec)

    expected = value.repeat_interleave(spec.group_size, 1)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
