"""FlashInfer's XQA decode in torch: mha.cu (csrc/xqa) behind decode.py and xqa.py of FlashInfer 0.6.12."""

from __future__ import annotations

import torch

from tests.backends_over_stand_ins import stand_in_op
from tests.flashinfer_stand_in.wrappers import check_layout, refuse_overlap

SEMAPHORE_BYTES = 4096
"""Start of the workspace, before the partial outputs. FlashInfer allocates 8 MiB, which a test does not need."""


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    *,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    if (backend, kv_layout) != ("xqa", "NHD"):
        raise KeyError(f"the stand-in is XQA's over NHD pages, got {backend} over {kv_layout}")
    refuse_overlap(enable_pdl)
    key, value = kv_cache
    if key.shape[1] not in (16, 32, 64, 128):
        raise ValueError(f"Invalid page_size: {key.shape[1]}, only 16, 32, 64, 128 are supported")
    if query.element_size() != 2 or query.shape[2] % 16 or not 16 <= query.shape[2] <= 256:
        raise ValueError(f"no kernel of {query.dtype} and head_dim {query.shape[2]}")
    if not (query.is_contiguous() and block_tables.is_contiguous() and seq_lens.is_contiguous()):
        raise RuntimeError("illegal memory access: XQA knows no strides of queries, tables and lengths")
    if workspace_buffer.numel() <= SEMAPHORE_BYTES:
        raise RuntimeError(f"the workspace has no room behind the semaphores: {workspace_buffer.numel()} bytes")
    out = torch.empty_like(query)
    check_layout(query, key, value, out)
    xqa(query, key, value, workspace_buffer, block_tables, seq_lens, out, bmm1_scale, window_left + 1)
    return out


@stand_in_op("flashinfer_stand_in::xqa", mutates=("out",))
def xqa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    """window 0 means none. A request without tokens comes out as NaN: 0 times the inverse of its weights' sum."""
    page_size, num_kv_heads = key.shape[1:3]
    semaphores = workspace[: 4 * len(query) * num_kv_heads].view(torch.int32)
    if semaphores.any():
        raise RuntimeError("partial outputs are merged by nobody: the semaphores must be 0 before the first use")
    # It takes strides in whole heads, and uses the keys' strides for the values too.
    strides = [stride // query.shape[2] * query.shape[2] for stride in key.stride()[:-1]]
    key, value = (tensor.as_strided(tensor.shape, (*strides, 1)) for tensor in (key, value))
    by_group = query.float().unflatten(1, (num_kv_heads, -1))
    for request, length in enumerate(seq_lens.tolist()):
        at = torch.arange(max(length - window, 0) if window else 0, length, device="cpu")
        page = block_tables[request, at // page_size].long()
        if ((page < 0) | (page >= len(key))).any():
            raise RuntimeError(f"illegal memory access: pages {page.tolist()} of {len(key)}")
        keys, values = (tensor[page, at % page_size].float() for tensor in (key, value))
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", by_group[request], keys) * scale, -1)
        found = torch.einsum("hgn,nhd->hgd", weights, values) if length else torch.full_like(by_group[0], float("nan"))
        out[request] = found.flatten(0, 1).to(out.dtype)
