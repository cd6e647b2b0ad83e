"""The files a mutation run draws from, and the mutants known to be equivalent."""

from __future__ import annotations

ROOMS = (
    *("builders/batch.py", "builders/contract.py", "builders/tables.py", "builders/paged.py", "builders/reference.py"),
    *("builders/sparse_window.py", "builders/flash_attn3.py", "builders/flashinfer/plan.py", "builders/kernels/*.py"),
    *("attn_backends/torch_reference.py", "attn_backends/sparse_swa_mla.py", "attn_backends/selection.py"),
    *("attn_backends/capabilities.py", "attn_backends/kernels/*.py"),
    *("spec_decode/graphs/*.py", "spec_decode/paged/*.py", "spec_decode/drafter/*.py", "spec_decode/drafter/*/*.py"),
    *("spec_decode/engine/**/*.py", "spec_decode/sampling/**/*.py", "spec_decode/verification/**/*.py"),
    *("spec_decode/models/kernels/*.py", "spec_decode/model_api/base.py", "spec_decode/trees/*.py"),
)
"""Patterns of the files whose mutants must die."""

EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
    "attn_backends/kernels/e4m3.py": {
        ("= 0x3C800000", "= 1015021567"): "the largest float below 2^-6 rounds to 2^-6 either way",
        ("abs_bits < BITS", "abs_bits <= BITS"): "both branches give 8 for exactly 2^-6",
    },
    "attn_backends/kernels/paged_attention.py": {
        (
            '"-inf"), 0.0, o_i)',
            '"-inf"), 1.0, o_i)',
        ): "a split without tokens has weight 0",
        ("GROUP - SLIDING_WINDOW + 1, 0)", "GROUP - SLIDING_WINDOW + 1, (-1))"): "the first block, as with 0",
        ("context_len - SLIDING_WINDOW + 1, 0)", "context_len - SLIDING_WINDOW + 1, (-1))"): "as above",
        (
            '"-inf"), 0.0, o_i)',
            '"-inf"), (-1.0), o_i)',
        ): "a split without tokens has weight 0",
        ("sliding_window or 0,", "sliding_window or (-1),"): "the kernel only uses a window above 0",
    },
    "builders/batch.py": {
        ("self.max_reqs - len(padded)))", "self.max_reqs + len(padded)))"): "entries past max_reqs are never read",
        ("lens, seqs, strict=True", "lens, seqs, strict=False"): "equal lengths are required just before",
        ("lens, seqs, strict=True", "lens, seqs"): "equal lengths are required just before",
    },
    "attn_backends/kernels/latent_attention.py": {
        (
            "kv_ptrs + offs_dv[None, :], mask=mask_n, other=0.0",
            "kv_ptrs + offs_dv[None, :], mask=mask_n, other=1.0",
        ): "a masked token has weight 0",
        (
            "kv_ptrs + offs_dv[None, :], mask=mask_n, other=0.0",
            "kv_ptrs + offs_dv[None, :], mask=mask_n, other=(-1.0)",
        ): "as above",
        ("merge_warps(1 if invariant", "merge_warps(2 if invariant"): "the number of warps only changes the time",
        ("merge_warps(1 if invariant", "merge_warps(0 if invariant"): "the number of warps only changes the time",
        (") // HEADS + 1", ") // HEADS - 1"): "masking a block that needs no mask does not change it",
    },
    "attn_backends/kernels/sparse_attention.py": {
        (
            "mask=mask_m[:, None],\n        other=0.0,",
            "mask=mask_m[:, None],\n        other=(-1.0),",
        ): "masked elements are not stored",
        (
            'ONE_BLOCK=width <= config["BLOCK_N"]',
            'ONE_BLOCK=width < config["BLOCK_N"]',
        ): "a loop over one block is that block",
        ("sink > SINK_LIMIT", "sink >= SINK_LIMIT"): "with a sink of 1e30 every score has weight 0, at either maximum",
    },
    "spec_decode/drafter/steps/module_step.py": {
        ("pages = min(", "pages = max("): "all caches of a group have the same number of pages",
    },
    "spec_decode/models/kernels/embed_concat.py": {
        (
            "norm_ptr + offs_h, mask=mask, other=0.0",
            "norm_ptr + offs_h, mask=mask, other=(-1.0)",
        ): "masked elements are not stored",
        ("norm_ptr + offs_h, mask=mask, other=0.0", "norm_ptr + offs_h, mask=mask, other=1.0"): "as above",
    },
    "spec_decode/models/kernels/hyper_connections.py": {
        (
            "write = tl.load(mixes_ptr + S + offs_s, mask=mask_s, other=0.0)",
            "write = tl.load(mixes_ptr + S + offs_s, mask=mask_s, other=(-1.0))",
        ): "masked elements are not stored",
    },
    "spec_decode/models/kernels/streamed_linear.py": {
        (
            "prefetch_weight(w_ptr, offs_w, k_start, W_ROWS, K, BLOCK_K, PDL)",
            "pass",
        ): "prefetching only changes the time",
        ("itemsize=itemsize, gated=self.gated", "itemsize=itemsize"): "tiling only changes the time",
    },
    "spec_decode/models/kernels/skinny_linear.py": {
        (
            "weight.nbytes > _EVICT_ABOVE_BYTES",
            "weight.nbytes >= _EVICT_ABOVE_BYTES",
        ): "a cache policy only changes the time",
    },
    "spec_decode/models/kernels/streamed_tma_kernel.py": {
        (
            "y = tl.where(y > limit, limit, y)",
            "y = tl.where(y >= limit, limit, y)",
        ): "a value at the limit stays the limit",
        ("up = tl.where(up > limit, limit", "up = tl.where(up >= limit, limit"): "as above",
    },
    "spec_decode/sampling/candidate_sampler.py": {
        ("codebooks, strict=True", "codebooks, strict=False"): "the op takes two, and raises for any other number",
        ("codebooks, strict=True", "codebooks"): "as above",
    },
    "spec_decode/sampling/kernels/select_candidates.py": {
        ("tl.sum(exps, 0)) >=", "tl.sum(exps, (-1))) >="): "of a single axis, the first is the last",
    },
    "spec_decode/sampling/kernels/threshold_search.py": {
        (
            "weight >= target, above, weight)",
            "weight > target, above, weight)",
        ): "once the weight equals the target, the search is over",
    },
    "spec_decode/sampling/kernels/restrict_logits.py": {
        ("part = min(", "part = max("): "how a row is split only changes the time",
    },
    "spec_decode/verification/kernels/accept_draft.py": {
        (
            "block_sum = tl.load(partial_sum_exp_ptr + part_offs, mask=mask, other=0.0)",
            "block_sum = tl.load(partial_sum_exp_ptr + part_offs, mask=mask, other=1.0)",
        ): "masked elements have weight 0",
        ("num_drafts, offs_k), 0)", "num_drafts, offs_k), (-1))"): "of a single axis, the first is the last",
    },
    "spec_decode/verification/kernels/partial_max.py": {
        ("blocks, dtype=torch.int32, device", "blocks, device"): "a float is exact for every token id below 2^24",
    },
}
"""Why a mutant is equivalent: file -> (old text, unique in the file; new text) -> reason."""
