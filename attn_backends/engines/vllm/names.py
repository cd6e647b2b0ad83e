"""Our names for vLLM's `attention_backend` and `quantization`, and a variable of ours."""

from __future__ import annotations

NAMES = {
    "FLASHINFER_IN_GRAPH": "attn_backends.engines.vllm.flashinfer.InGraphFlashInfer",
    "ATTN_BACKENDS_TRITON_PAGED": "attn_backends.engines.vllm.paged.TritonPaged",
    "ATTN_BACKENDS_FLASH_ATTN3": "attn_backends.engines.vllm.paged.FlashAttn3",
    "ATTN_BACKENDS_TRITON_MLA": "attn_backends.engines.vllm.mla.TritonMla",
    "ATTN_BACKENDS_FLASH_ATTN3_MLA": "attn_backends.engines.vllm.mla.FlashAttn3Mla",
    "ATTN_BACKENDS_FLASHMLA": "attn_backends.engines.vllm.mla.Flashmla",
    "FLASHMLA_SPARSE_IN_GRAPH": "attn_backends.engines.vllm.sparse.InGraphFlashMlaSparse",
}
"""Name and class of each backend. The class's get_name() returns the same name: vLLM finds a layer's backend by it."""

PLAIN, ROUNDED = "attn_backends", "attn_backends_fp8"
"""Our quantizations, with weights of 16 bits and of 8."""
DRAFT_HEAD = "ATTN_BACKENDS_DRAFT_HEAD"
"""The variable that makes greedy drafts read their head with our kernel: see `draft_heads.HeadChoice`."""
