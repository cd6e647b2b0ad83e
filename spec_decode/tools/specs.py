"""The specs that backends are queried for and timed on, in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import torch

from builders import AttentionKind, AttentionSpec, StateSpec

GQA = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16)
"""A common 8B model."""
MLA = AttentionSpec(num_q_heads=16, num_kv_heads=1, head_dim=576, value_dim=512, page_size=64, kind=AttentionKind.MLA)
"""DeepSeek-V3 on one of eight devices."""
SPARSE = AttentionSpec(
    num_q_heads=64, num_kv_heads=1, head_dim=512, page_size=64, sliding_window=128, sinks=True, kind=AttentionKind.MLA
)
"""DeepSeek-V4."""
FP8_DS_MLA = replace(SPARSE, kv_dtype=torch.float8_e4m3fn)
"""The same with the fp8_ds_mla cache."""
GATED_DELTA = StateSpec(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, journal=16)
"""Qwen3-Next."""
