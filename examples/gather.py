"""A complete attention backend: grouped heads in plain torch, with metadata that advances in place.

The builder turns a batch into the metadata that the kernels read and keeps it current; the backend declares its
capabilities and computes attention. `attn-backends check gather` finds it once a package declares it as an entry point,
see docs/adding-a-backend.md.
"""

from dataclasses import replace

import torch

from attn_backends import AttentionBackend, Capabilities, Feature, Sizes, check_forward_inputs, register
from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionBatch,
    CaptureConstants,
    GraphSupport,
    MetadataBuilder,
)


class GatherBuilder(MetadataBuilder[AttentionBatch]):
    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "positions", "slot_mapping")

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "every step field is a view of the shared state")

    def build(self, batch, *, horizon=0):
        return replace(batch, host_seq_lens=None, host_seq_lens_exact=False)  # the host's copy does not advance

    def advance(self, metadata):
        """Nothing is derived from the shared state, so nothing can be stale."""

    def capture_constants(self, m):
        return CaptureConstants(max_reqs=m.num_reqs, max_query_len=m.max_query_len, max_seq_len=m.max_seq_len)


@register
class Gather(AttentionBackend):
    name, builder, contract_version = "gather", GatherBuilder, (1, 2)
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32,),
        head_dims=Sizes(),
        page_sizes=Sizes(),
        features=frozenset({Feature.GQA}),
    )

    def forward(self, query, cache, m, *, spec, sinks=None):
        check_forward_inputs(query, cache, m, spec, sinks)
        token, place = (torch.arange(n, device=query.device) for n in (m.num_tokens, m.max_seq_len))
        row = torch.searchsorted(m.query_start_loc[1:], token, right=True).clamp(max=m.num_reqs - 1)
        live = (m.seq_lens[row] > 0) & (token < m.query_start_loc[-1])
        seen = live[:, None] & (place <= m.positions[:, None])
        page = torch.where(seen, m.block_table[row][:, place // spec.page_size], 0)
        key, value = (
            torch.where(seen[..., None, None], kv[page, place % spec.page_size], 0).repeat_interleave(
                spec.group_size, 2
            )
            for kv in (cache.key, cache.value)
        )
        scores = torch.einsum("thd,tlhd->thl", query, key) * spec.softmax_scale
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0)
        return torch.einsum("thl,tlhd->thd", weights, value)
