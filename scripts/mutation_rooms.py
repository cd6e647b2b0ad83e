"""What a mutation run draws from, and the changes that change nothing."""

from __future__ import annotations

ROOMS = (
    *("builders/batch.py", "builders/contract.py", "builders/tables.py", "builders/paged.py", "builders/reference.py"),
    *("builders/sparse_window.py", "builders/flash_attn3.py", "builders/flashinfer/plan.py", "builders/kernels/*.py"),
    *("attn_backends/torch_reference.py", "attn_backends/sparse_swa_mla.py", "attn_backends/selection.py"),
    *("attn_backends/capabilities.py", "attn_backends/kernels/*.py"),
    *("spec_decode/graphs/*.py", "spec_decode/paged/*.py", "spec_decode/drafter/*.py", "spec_decode/drafter/*/*.py"),
    *("spec_decode/engine/**/*.py", "spec_decode/sampling/**/*.py", "spec_decode/verification/**/*.py"),
    *("spec_decode/models/kernels/*.py", "spec_decode/models/kept_rows.py"),
)
"""Patterns of the files whose mutants must die."""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "attn_backends/kernels/e4m3.py",
        "code = tl.where(size < 0x3C800000, small, large)",
        "code = tl.where(size < 1015021567, small, large)",
    ): "the number below 2^-6 itself is rounded to it either way",
    (
        "attn_backends/kernels/paged_attention_kernels.py",
        'merged = tl.fma(tl.where(of_split == float("-inf"), 0.0, row), share, merged)',
        'merged = tl.fma(tl.where(of_split == float("-inf"), 1.0, row), share, merged)',
    ): "a split without tokens has no share: any number will do that is one",
    (
        "attn_backends/torch_reference.py",
        "return torch.where(seen[..., None, None], rows, 0.0)",
        "return torch.where(seen[..., None, None], rows, 1.0)",
    ): "what is not seen has weight 0: any number will do that is one",
    (
        "builders/batch.py",
        "for request, (query, seq) in enumerate(zip(lens, seqs, strict=True)):",
        "for request, (query, seq) in enumerate(zip(lens, seqs, strict=False)):",
    ): "as many of both are required just before",
    (
        "attn_backends/kernels/latent_attention_kernels.py",
        "seen_by_all = cached + (tile * BLOCK_M) // HEADS + 1",
        "seen_by_all = cached + (tile * BLOCK_M) // HEADS - 1",
    ): "a block that need not be masked is masked, and comes out the same",
    (
        "attn_backends/kernels/paged_attention.py",
        'SPLIT_BLOCKS=SPLIT_TOKENS // tile["BLOCK_N"] if fixed else 0, WINDOW=self.sliding_window or 0,',
        'SPLIT_BLOCKS=SPLIT_TOKENS // tile["BLOCK_N"] if fixed else 0, WINDOW=self.sliding_window or (-1),',
    ): "the kernel looks at a window above 0 alone",
    (
        "attn_backends/kernels/paged_attention.py",
        "out = torch.empty(tokens, heads, value_dim, dtype=out_dtype, device=query.device)",
        "out = torch.empty(tokens, heads, value_dim, device=query.device)",
    ): "the result is brought to the query's dtype in the end",
    (
        "attn_backends/kernels/paged_attention_kernels.py",
        "start = tl.maximum(cached + (tile * BLOCK_M) // GROUP - WINDOW + 1, 0)",
        "start = tl.maximum(cached + (tile * BLOCK_M) // GROUP - WINDOW + 1, (-1))",
    ): "-1 divided by the size of a block is the first block, as 0 is",
    (
        "attn_backends/kernels/paged_attention_kernels.py",
        'merged = tl.fma(tl.where(of_split == float("-inf"), 0.0, row), share, merged)',
        'merged = tl.fma(tl.where(of_split == float("-inf"), (-1.0), row), share, merged)',
    ): "a split without tokens has no share: any number will do that is one",
    (
        "attn_backends/kernels/sparse_attention_kernels.py",
        "peak = tl.where(sink > 1e30, 1e30, tl.maximum(sink * 1.4426950408889634, peak))",
        "peak = tl.where(sink >= 1e30, 1e30, tl.maximum(sink * 1.4426950408889634, peak))",
    ): "beside a sink of 1e30 no score has a weight, whichever the peak",
    (
        "attn_backends/torch_reference.py",
        "return torch.where(seen[..., None, None], rows, 0.0)",
        "return torch.where(seen[..., None, None], rows, (-1.0))",
    ): "what is not seen has weight 0: any number will do that is one",
    (
        "builders/batch.py",
        "for request, (query, seq) in enumerate(zip(lens, seqs, strict=True)):",
        "for request, (query, seq) in enumerate(zip(lens, seqs)):",
    ): "as many of both are required just before",
    (
        "attn_backends/kernels/e4m3.py",
        "code = tl.where(size < 0x3C800000, small, large)",
        "code = tl.where(size <= 0x3C800000, small, large)",
    ): "both give 8 for 2^-6 itself",
    (
        "spec_decode/sampling/kernels/restrict_logits.py",
        "part = min(_PART, triton.next_power_of_2(vocab))",
        "part = max(_PART, triton.next_power_of_2(vocab))",
    ): "how a row is divided changes the time that it takes, and nothing else",
    (
        "spec_decode/sampling/kernels/restrict_logits_kernels.py",
        "count, sum_exp = _count_part(logits, row, part, vocab, edge, largest, False, PART, LANES, BINS)",
        "count, sum_exp = _count_part(logits, row, part, vocab, edge, largest, True, PART, LANES, BINS)",
    ): "without top_p nothing reads the sums",
    (
        "spec_decode/verification/kernels/block_verify.py",
        "count = tl.min(tl.where(passes, columns, column), 0)",
        "count = tl.min(tl.where(passes, columns, column), (-1))",
    ): "of one axis the first is the last",
    (
        "spec_decode/verification/kernels/partial_max.py",
        "argmax = torch.empty(rows * columns, blocks, dtype=torch.int32, device=device)",
        "argmax = torch.empty(rows * columns, blocks, device=device)",
    ): "a float holds every token of a vocabulary below 2^24",
}
"""Why a change leaves everything as it was, by file, line before and line after."""
