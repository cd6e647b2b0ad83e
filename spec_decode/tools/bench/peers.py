"""FlashInfer's own kernels as yardsticks: planned by itself for the very lengths of a scene, and nothing advances."""

from __future__ import annotations

import torch

from spec_decode.tools.bench.scene import Attend, DecodeScene

_WORKSPACE_BYTES = 128 << 20
"""FlashInfer's own recommendation."""


def flashinfer_decode(scene: DecodeScene) -> Attend:
    """The paged decode on tensor cores, with what its package sets by default."""
    import flashinfer  # type: ignore[import-not-found]

    spec = scene.spec
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(scene), "NHD", use_tensor_cores=True)
    indptr, pages = _pages(scene)
    behind = scene.context - (len(pages) // scene.num_reqs - 1) * spec.page_size
    wrapper.plan(
        indptr,
        pages,
        torch.full((scene.num_reqs,), behind, dtype=torch.int32),
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.page_size,
        sm_scale=spec.softmax_scale,
        q_data_type=spec.dtype,
        kv_data_type=spec.cache_dtype,
    )
    return lambda cache: wrapper.run(scene.query, (cache.key, cache.value))


def flashinfer_mla(scene: DecodeScene) -> Attend:
    """The latent attention for Hopper: the value's dims and the rotary ones go in as views of one cache."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]

    spec, dim = scene.spec, scene.spec.out_dim
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(scene), backend="fa3")
    indptr, pages = _pages(scene)
    wrapper.plan(
        torch.arange(scene.num_reqs + 1, dtype=torch.int32),
        indptr,
        pages,
        torch.full((scene.num_reqs,), scene.context, dtype=torch.int32),
        spec.num_q_heads,
        dim,
        spec.head_dim - dim,
        spec.page_size,
        False,  # one query token sees all that is cached: nothing to mask
        spec.softmax_scale,
        spec.dtype,
        spec.cache_dtype,
    )
    query = scene.query[..., :dim], scene.query[..., dim:]
    return lambda cache: wrapper.run(*query, cache.latents[..., :dim], cache.latents[..., dim:])


def _workspace(scene: DecodeScene) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=scene.device)


def _pages(scene: DecodeScene) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's list of pages: where each request's begin, int32 [num_reqs + 1] on the host, and the pages."""
    each = -(-scene.context // scene.spec.page_size)
    indptr = torch.arange(scene.num_reqs + 1, dtype=torch.int32) * each
    return indptr, scene.batch.block_table[:, :each].reshape(-1)
