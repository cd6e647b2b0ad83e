"""Whether a request's top_k and top_p leave tokens out."""

from __future__ import annotations

import torch

from builders.kernels.triton_runtime import tl, triton


def is_restricted(top_k: torch.Tensor, top_p: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool [R], of top_k int32 [R] and top_p fp32 [R], over `vocab` tokens."""
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1)


@triton.jit
def restriction(top_k_ptr, top_p_ptr, request, vocab_size):
    """A request's k and p, and whether each of them is on."""
    k = tl.load(top_k_ptr + request)
    p = tl.load(top_p_ptr + request)
    return k, p, (k > 0) & (k < vocab_size), p < 1
