"""The files a mutation run draws from, and the mutants known to be equivalent."""

from __future__ import annotations

ROOMS = (
    *("builders/batch.py", "builders/contract.py", "builders/tables.py", "builders/paged.py", "builders/reference.py"),
    *("builders/sparse_window.py", "builders/flash_attn3.py", "builders/flashinfer/plan.py", "builders/kernels/*.py"),
    *("attn_backends/torch_reference.py", "attn_backends/sparse_swa_mla.py", "attn_backends/selection.py"),
    *("attn_backends/capabilities.py", "attn_backends/kernels/*.py"),
    *("spec_decode/graphs/*.py", "spec_decode/paged/*.py", "spec_decode/drafter/*.py", "spec_decode/drafter/*/*.py"),
    *("spec_decode/engine/**/*.py", "spec_decode/sampling/**/*.py", "spec_decode/verification/**/*.py"),
    *("spec_decode/models/kernels/*.py", "spec_decode/models/base.py"),
)
"""Patterns of the files whose mutants must die."""

EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
    "attn_backends/kernels/e4m3.py": {
        ("= 0x3C800000", "= 1015021567"): "the number below 2^-6 itself is rounded to it either way",
        ("abs_bits < BITS", "abs_bits <= BITS"): "both give 8 for 2^-6 itself",
    },
    "attn_backends/kernels/paged_attention.py": {
        (
            '"-inf"), 0.0, o_i)',
            '"-inf"), 1.0, o_i)',
        ): "a split without tokens has no share",
        ("GROUP - SLIDING_WINDOW + 1, 0)", "GROUP - SLIDING_WINDOW + 1, (-1))"): "the first block, as 0 is",
        ("context_len - SLIDING_WINDOW + 1, 0)", "context_len - SLIDING_WINDOW + 1, (-1))"): "likewise",
        (
            '"-inf"), 0.0, o_i)',
            '"-inf"), (-1.0), o_i)',
        ): "a split without tokens has no share",
        ("sliding_window or 0,", "sliding_window or (-1),"): "the kernel looks at a window above 0 alone",
    },
    "builders/batch.py": {
        ("self.max_reqs - len(padded)))", "self.max_reqs + len(padded)))"): "what lies behind max_reqs is never read",
        ("lens, seqs, strict=True", "lens, seqs, strict=False"): "as many of both are required just before",
        ("lens, seqs, strict=True", "lens, seqs"): "as many of both are required just before",
    },
    "attn_backends/kernels/latent_attention.py": {
        (
            "kv_ptrs + offs_dv[None, :], mask=mask_n, other=0.0",
            "kv_ptrs + offs_dv[None, :], mask=mask_n, other=1.0",
        ): "a token that is masked has the weight 0",
        (
            "kv_ptrs + offs_dv[None, :], mask=mask_n, other=0.0",
            "kv_ptrs + offs_dv[None, :], mask=mask_n, other=(-1.0)",
        ): "likewise",
        ("merge_warps(1 if invariant", "merge_warps(2 if invariant"): "threads change the time alone",
        ("merge_warps(1 if invariant", "merge_warps(0 if invariant"): "threads change the time alone",
        (") // HEADS + 1", ") // HEADS - 1"): "a block that need not be masked is masked, and comes out the same",
    },
    "attn_backends/kernels/sparse_attention.py": {
        (
            "mask=mask_m[:, None],\n        other=0.0,",
            "mask=mask_m[:, None],\n        other=(-1.0),",
        ): "what is masked is not stored",
        (
            'ONE_BLOCK=width <= config["BLOCK_N"]',
            'ONE_BLOCK=width < config["BLOCK_N"]',
        ): "a loop of one block is that block",
        ("sink > SINK_LIMIT", "sink >= SINK_LIMIT"): "beside a sink of 1e30 no score has a weight, whichever the peak",
    },
    "spec_decode/drafter/steps/module_step.py": {
        ("pages = min(", "pages = max("): "the caches of a group have as many pages",
    },
    "spec_decode/models/kernels/embed_concat.py": {
        (
            "norm_ptr + offs_h, mask=mask, other=0.0",
            "norm_ptr + offs_h, mask=mask, other=(-1.0)",
        ): "what is masked is not stored",
        ("norm_ptr + offs_h, mask=mask, other=0.0", "norm_ptr + offs_h, mask=mask, other=1.0"): "likewise",
    },
    "spec_decode/models/kernels/hyper_connections.py": {
        (
            "write = tl.load(mixes_ptr + S + offs_s, mask=mask_s, other=0.0)",
            "write = tl.load(mixes_ptr + S + offs_s, mask=mask_s, other=(-1.0))",
        ): "what is masked is not stored",
    },
    "spec_decode/models/kernels/streamed_linear.py": {
        (
            "prefetch_weight(w_ptr, offs_w, k_start, W_ROWS, K, BLOCK_K, PDL)",
            "pass",
        ): "fetching ahead changes the time alone",
        ("itemsize=itemsize, gated=self.gated", "itemsize=itemsize"): "how it is cut changes the time alone",
    },
    "spec_decode/models/kernels/skinny_linear.py": {
        (
            "weight.nbytes > _EVICT_ABOVE_BYTES",
            "weight.nbytes >= _EVICT_ABOVE_BYTES",
        ): "a cache policy changes the time alone",
    },
    "spec_decode/models/kernels/streamed_tma_kernel.py": {
        ("y = tl.where(y > limit, limit, y)", "y = tl.where(y >= limit, limit, y)"): "the limit is the limit",
        ("up = tl.where(up > limit, limit", "up = tl.where(up >= limit, limit"): "likewise",
    },
    "spec_decode/sampling/candidate_sampler.py": {
        ("codebooks, strict=True", "codebooks, strict=False"): "the op takes two, and fails for another number",
        ("codebooks, strict=True", "codebooks"): "likewise",
    },
    "spec_decode/sampling/kernels/select_candidates.py": {
        ("tl.sum(exps, 0)) >=", "tl.sum(exps, (-1))) >="): "of one axis the first is the last",
    },
    "spec_decode/sampling/kernels/threshold_search.py": {
        (
            "weight >= target, above, weight)",
            "weight > target, above, weight)",
        ): "with the weight sought the search is over",
    },
    "spec_decode/sampling/kernels/restrict_logits.py": {
        ("part = min(", "part = max("): "how a row is divided changes the time that it takes, and nothing else",
        ("row_max, False, PART", "row_max, True, PART"): "without top_p nothing reads the sums",
    },
    "spec_decode/verification/kernels/accept_draft.py": {
        (
            "block_sum = tl.load(partial_sum_exp_ptr + part_offs, mask=mask, other=0.0)",
            "block_sum = tl.load(partial_sum_exp_ptr + part_offs, mask=mask, other=1.0)",
        ): "what is masked has the weight 0",
        ("num_drafts, offs_k), 0)", "num_drafts, offs_k), (-1))"): "of one axis the first is the last",
    },
    "spec_decode/verification/kernels/partial_max.py": {
        ("blocks, dtype=torch.int32, device", "blocks, device"): "a float holds every token of a vocabulary below 2^24",
    },
}
"""Why a mutant is equivalent: file -> (old text, unique in the file; new text) -> reason."""
