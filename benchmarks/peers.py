"""FlashInfer's own kernels as peers: planned by FlashInfer for a fixture's lengths; nothing advances."""

from __future__ import annotations

import torch

from benchmarks.decode_fixture import AttentionCall, DecodeFixture

_WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommendation."""


def flashinfer_decode(fixture: DecodeFixture) -> AttentionCall:
    """Plan the paged decode on tensor cores, with the package's defaults."""
    import flashinfer  # type: ignore[import-not-found]

    spec = fixture.spec
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(fixture), "NHD", use_tensor_cores=True)
    indptr, pages = _pages(fixture)
    last = fixture.context - (len(pages) // fixture.num_reqs - 1) * spec.page_size
    last_page_len = torch.full((fixture.num_reqs,), last, dtype=torch.int32)
    sizes = spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.page_size
    numbers = {"sm_scale": spec.softmax_scale, "q_data_type": spec.dtype, "kv_data_type": spec.cache_dtype}
    wrapper.plan(indptr, pages, last_page_len, *sizes, **numbers)
    return lambda cache: wrapper.run(fixture.query, (cache.key, cache.value))


def flashinfer_mla(fixture: DecodeFixture) -> AttentionCall:
    """Plan the latent attention for Hopper: the value and rotary dims are passed as views of one cache."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]

    spec, dim = fixture.spec, fixture.spec.out_dim
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(fixture), backend="fa3")
    indptr, pages = _pages(fixture)
    queries = torch.arange(fixture.num_reqs + 1, dtype=torch.int32)
    lens = torch.full((fixture.num_reqs,), fixture.context, dtype=torch.int32)
    sizes = spec.num_q_heads, dim, spec.head_dim - dim, spec.page_size
    causal = False  # one query token sees the whole cache: nothing to mask
    wrapper.plan(queries, indptr, pages, lens, *sizes, causal, spec.softmax_scale, spec.dtype, spec.cache_dtype)
    query = fixture.query[..., :dim], fixture.query[..., dim:]
    return lambda cache: wrapper.run(*query, cache.latents[..., :dim], cache.latents[..., dim:])


def _workspace(fixture: DecodeFixture) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=fixture.device)


def _pages(fixture: DecodeFixture) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FlashInfer's page list: each request's first index, int32 [num_reqs + 1] on the host, and the pages."""
    each = -(-fixture.context // fixture.spec.page_size)
    indptr = torch.arange(fixture.num_reqs + 1, dtype=torch.int32) * each
    return indptr, fixture.batch.block_table[:, :each].reshape(-1)
