"""Titles of the cases, which a report carries for its readers."""

from __future__ import annotations

_DRAFTS = {
    "llama3-8b-eagle": "Llama-3-8B's EAGLE",
    "qwen3-8b-eagle3": "Qwen3-8B's EAGLE-3",
    "gpt-oss-20b-eagle3": "GPT-OSS-20B's EAGLE-3",
    "glm-4.7-flash-mtp": "GLM-4.7-Flash's MTP",
    "kimi-k2-eagle3": "Kimi-K2's EAGLE-3",
    "deepseek-v4-mtp": "DeepSeek-V4's MTP",
    "eagle-1024": "an EAGLE draft 1024 wide",
    "llama3-8b-peagle": "Llama-3-8B's P-EAGLE",
    "llama3-8b-peagle/llama3-8b-eagle": "Llama-3-8B's EAGLE, the same number of tokens step by step",
    "gpt-oss-20b-peagle": "GPT-OSS-20B's P-EAGLE",
    "gpt-oss-20b-peagle/gpt-oss-20b-eagle3": "GPT-OSS-20B's EAGLE-3, the same number of tokens step by step",
    "qwen3-8b-dflash": "Qwen3-8B's DFlash",
    "qwen3-8b-dflash2": "a DFlash2 for Qwen3-8B",
    "qwen3-8b-dflash2/qwen3-8b-dflash": "Qwen3-8B's DFlash, the same number of tokens at once",
    "qwen3-8b-dflash/qwen3-8b-eagle3": "Qwen3-8B's EAGLE-3, the same number of tokens step by step",
}
TITLES = {
    "paged-decode": "Decode attention over paged KV",
    "mla-decode": "Decode attention over latents (MLA)",
    "sparse-decode": "Decode attention over a sparse window (MLA)",
    "flashinfer-decode": "Decode attention by FlashInfer: its choice and each kernel",
    "advance": "Advancing the metadata by one token",
    "step": "One step: advance, write, attend",
    "round": "A whole draft round",
    "round/steps": "Steps 1 to K-1 of a draft round",
    **{f"{name}/round": f"A whole draft round of {draft}" for name, draft in _DRAFTS.items()},
    **{f"{name}/fp8-round": f"A whole draft round of {draft}, with fp8 weights" for name, draft in _DRAFTS.items()},
    **{f"{name}/steps": f"Steps 1 to K-1 of {draft}" for name, draft in _DRAFTS.items()},
    **{f"{name}-compiled": f"Steps 1 to K-1 of {draft}, and torch.compile" for name, draft in _DRAFTS.items()},
    "products": "The products of these drafts, compared with torch's own",
    "tree-verify": "Attention of trees, compared with chains of as many tokens",
    "block-trees": "A whole engine: a block as a tree or as a chain, by the tokens that a trained pair accepts",
    "block-tree-rounds": "A whole engine: rounds of a block as a tree or as a chain",
    "throughput/block-drafts": "A whole engine: a block draft or a step-by-step draft",
    "throughput/speculation": "A whole engine: speculation or plain decoding",
    "throughput/extend-graph": "A whole engine: step 0 of the draft in a graph, or launched",
    "throughput/one-graph": "A whole engine: one graph of draft and target, or two",
    "throughput/batch-invariant": "A whole engine: batch invariant or not",
    "sampling/top-k": "Logits restricted to top-k, compared with FlashInfer's sampling",
    "sampling/top-p": "Probabilities restricted to top-p, compared with FlashInfer's sampling",
    "sampling/top-k and top-p": "Probabilities restricted to top-k and top-p, compared with FlashInfer's sampling",
    "sampling/draw a draft token": "Drawing a draft token, compared with FlashInfer's sampling",
    "sampling/draw a target token": "Drawing the target's token, compared with FlashInfer's sampling",
    "sampling/draw a restricted target token": "Drawing the target's token with top-k and top-p, compared with "
    "FlashInfer's sampling",
    "sampling/argmax": "The most likely token, compared with torch",
    "sampling/argmax of a target": "The most likely token of a target, compared with torch",
}
"""Case of a row -> what it compares, as the matrix shows it. A case without a title is shown by its name."""
