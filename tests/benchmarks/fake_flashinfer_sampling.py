"""FlashInfer's sampling as far as the benchmarks call it, in torch: seeds and all as its sources have them."""

from __future__ import annotations

from types import ModuleType

import torch


def softmax(logits):
    return logits.softmax(-1)


def top_k_mask_logits(logits, top_k):
    return torch.stack(
        [x.masked_fill(x < x.topk(int(k)).values[-1], -torch.inf) for x, k in zip(logits, top_k, strict=True)]
    )


def top_k_renorm_probs(probs, top_k):
    kept = torch.stack([p * (p >= p.topk(int(k)).values[-1]) for p, k in zip(probs, top_k, strict=True)])
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs, top_p, *, is_deterministic):
    assert is_deterministic
    ranked, order = probs.sort(-1, descending=True)
    before = ranked.double().cumsum(-1) - ranked
    kept = torch.zeros_like(probs).scatter(1, order, ranked * (before < top_p[:, None]))
    return kept / kept.sum(-1, keepdim=True)


def sampling_from_probs(probs, *, seed, offset):
    assert seed.shape == offset.shape == probs.shape[:1]
    generators = [torch.Generator().manual_seed(int(seed[0] * 1009 + offset[0]) + row) for row in range(len(probs))]
    return torch.cat([p.multinomial(1, generator=g) for p, g in zip(probs, generators, strict=True)]).int()


def sampling_from_logits(logits, *, seed, offset):
    return sampling_from_probs(softmax(logits), seed=seed, offset=offset)


def top_k_top_p_sampling_from_probs(probs, top_k, top_p, *, seed, offset):
    kept = top_p_renorm_probs(top_k_renorm_probs(probs, top_k), top_p, is_deterministic=True)
    return sampling_from_probs(kept, seed=seed, offset=offset)


def modules() -> dict[str, ModuleType]:
    """What goes into sys.modules."""
    package, sampling = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
    for op in (
        softmax,
        top_k_mask_logits,
        top_k_renorm_probs,
        top_p_renorm_probs,
        sampling_from_probs,
        sampling_from_logits,
        top_k_top_p_sampling_from_probs,
    ):
        setattr(sampling, op.__name__, op)
    package.sampling = sampling
    return {module.__name__: module for module in (package, sampling)}
