"""The builders of gated delta rules, which sort rows by masks."""

from __future__ import annotations

from typing import Any

from engine_kits.hash_recurrence import Slots


def run_drafted(metadata: Any, tokens: list[int], slots: Slots) -> list[int]:
    """Stand in for the kernels of the rows that may have drafts, and return the other rows' tokens."""
    m, drafted, other = metadata, tokens, list[int]()
    if m.num_prefills or m.num_decodes:
        drafted, other = ([tokens[i] for i in part.tolist()] for part in (m.spec_token_indx, m.non_spec_token_indx))
    columns, starts = m.spec_state_indices_tensor[: m.num_spec_decodes], m.spec_query_start_loc
    slots.slide_drafts(columns[:, 0], m.num_accepted_tokens, starts, drafted)
    slots.run_drafts(columns, m.num_accepted_tokens[: m.num_spec_decodes], starts, drafted)
    return other
