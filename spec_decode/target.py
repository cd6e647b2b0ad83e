"""The target over a paged cache: ragged prefill and uniform verification, eager."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from builders import RequestTables
from spec_decode.kv_groups import KVGroup, attend_with, build_ragged
from spec_decode.models.llama import LlamaTarget


class TargetRunner:
    """Runs a target over the requests of some tables; its groups' caches outlive any one call."""

    def __init__(self, model: LlamaTarget, groups: Sequence[KVGroup]) -> None:
        self.model = model
        self.groups = tuple(groups)

    @torch.no_grad()
    def run(
        self,
        tables: RequestTables,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states [T, H] of flat token_ids int64 [T]: request r's last query_lens[r] of seq_lens[r] tokens."""
        batch, metadata = build_ragged(self.groups, tables, query_lens, seq_lens)
        hidden: torch.Tensor = self.model(token_ids, batch.positions, attend_with(self.groups, metadata)).hidden
        return hidden
