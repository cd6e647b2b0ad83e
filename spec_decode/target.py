"""The target over a paged cache: ragged prefill and uniform verification, eager."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from builders import BatchBuffers, RequestTables
from spec_decode.kv_groups import KVGroup, attend_with
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
        total = sum(query_lens)
        batch = BatchBuffers(tables, max_tokens=total)
        num_reqs, num_tokens = batch.load(query_lens, seq_lens)
        metadata = []
        for index, group in enumerate(self.groups):
            builder = group.make_builder(
                tables.device, max_reqs=tables.max_reqs, max_tokens=total, max_seq_len=tables.max_seq_len
            )
            view = batch.view(
                index,
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                max_query_len=max(query_lens),
                max_seq_len=max(seq_lens),
                uniform=len(set(query_lens)) == 1,
                host_seq_lens=seq_lens,
                host_seq_lens_exact=True,
            )
            metadata.append(builder.build(view))
        hidden: torch.Tensor = self.model(token_ids, batch.positions[:num_tokens], attend_with(self.groups, metadata))
        return hidden
