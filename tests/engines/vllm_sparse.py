"""A layer over sparse latents with its indexer, as in DeepSeek-V3.2, in vLLM's own groups and classes.

Stand-ins in torch replace the kernels: FlashMLA's, whose schedule is the first call's, DeepGEMM's schedule, and the
indexer's scores. They read only through vLLM's metadata. See vllm_runner.py for what it needs.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from tests.engines.vllm_runner import HEADS, SPARSE, TOKENS, LatentRunner, backend_of, default_dtype
from tests.factories import CPU, make_spec

INDEXER = "model.layers.0.indexer"
TOPK, INDEX_DIM, SCALE = 128, 16, 0.1
FP8 = "fp8_ds_mla"
CACHES = [("auto", False), (FP8, False), (FP8, True)]
"""A cache's dtype, and whether vLLM runs decodes separately from prefills."""


@dataclass
class FlashMLASchedMeta:
    """Empty until the first call; later calls use its schedule, even if the inputs have changed."""

    schedule: torch.Tensor | None = None


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, topk_length, out=None):
    """Attend with queries [T, H, 576] over rows of kv [N, 1, 576] by indices [T, 1, topk]: out, two placeholders."""
    found = attend(q, kv[:, 0], indices[:, 0], sm_scale, topk_length)
    return found, None, q.new_zeros(q.shape[:2])


def flash_mla_with_kvcache(
    *,
    q,
    k_cache,
    block_table,
    head_dim_v,
    cache_seqlens,
    tile_scheduler_metadata,
    is_fp8_kvcache,
    indices,
    softmax_scale,
):
    """Attend with queries [B, S, H, 576] over 656 bytes a token, by indices [B, S, topk] and the first schedule."""
    assert is_fp8_kvcache and head_dim_v == 512 and k_cache.shape[1:] == (64, 1, 656)
    metadata = tile_scheduler_metadata
    if metadata.schedule is None:
        metadata.schedule = torch.full((q.shape[0] * q.shape[1],), indices.shape[-1], dtype=torch.int32)
    assert len(metadata.schedule) == q.shape[0] * q.shape[1]
    rows = unpack(k_cache.flatten(0, 2))
    out = attend(q.flatten(0, 1), rows, indices.flatten(0, 1), softmax_scale, metadata.schedule)
    return out.view(*q.shape[:3], head_dim_v), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])


def attend(query, rows, indices, scale, count):
    seen = (indices >= 0) & (torch.arange(indices.shape[1]) < count[:, None])
    latents = rows[indices.clamp(0).long()].float()
    scores = (torch.einsum("thd,tnd->thn", query.float(), latents) * scale).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("thn,tnd->thd", weights, latents[..., :512]).to(query.dtype)


def pack(latents):
    """Pack latents [..., 576] into 656 bytes each: 512 in fp8 with a scale per 128, then 64 in bfloat16."""
    values = latents[..., :512].float().unflatten(-1, (4, 128))
    scales = values.abs().amax(-1) / 448
    quantised = (values / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    rotary = latents[..., 512:].bfloat16().contiguous()
    return torch.cat([part.contiguous().view(torch.uint8) for part in (quantised, scales, rotary)], -1)


def unpack(packed):
    values, scales, rotary = (part.contiguous() for part in packed.split([512, 16, 128], -1))
    values = values.view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128)) * scales.view(torch.float32)[..., None]
    return torch.cat([values.flatten(-2), rotary.view(torch.bfloat16).float()], -1)


def get_paged_mqa_logits_metadata(context_lens, block_size, num_sms, indices=None):
    """DeepGEMM's schedule, enough to detect staleness: [num_sms + 1, 2], row r has a row's last length and blocks."""
    last = context_lens[:, -1]
    rows = torch.stack([last, (last + block_size - 1) // block_size], -1)
    return torch.cat([rows, rows.new_zeros(num_sms + 1 - len(rows), 2)])


def install(monkeypatch, *, native=False, separate=False):
    """Install the stand-ins where vLLM looks for the kernels.

    native    whether DeepGEMM takes a request's 1 + K tokens at once, otherwise one by one
    separate  whether vLLM decodes a quantised cache separately from prefills, as it does from 32 heads on
    """
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm.v1.attention.backends.mla import flashmla_sparse, index_group, indexer
    from vllm.v1.attention.ops import flashmla

    for kernel in (flash_mla_sparse_fwd, flash_mla_with_kvcache, FlashMLASchedMeta):
        monkeypatch.setattr(flashmla_sparse, kernel.__name__, kernel)
    monkeypatch.setattr(flashmla, "FlashMLASchedMeta", FlashMLASchedMeta)
    monkeypatch.setattr(flashmla_sparse, "get_mla_metadata", lambda: (FlashMLASchedMeta(), None))
    monkeypatch.setattr(flashmla_sparse, "MIN_HEADS_FOR_BF16_PREFILL", 0 if separate else 32)
    for name in ("current_stream", "_create_side_stream", "_create_event"):
        monkeypatch.setattr(index_group, name, MagicMock(name=name))
    monkeypatch.setattr(indexer, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(indexer, "native_next_n_supported", lambda next_n: native)
    monkeypatch.setattr(indexer, get_paged_mqa_logits_metadata.__name__, get_paged_mqa_logits_metadata)
    monkeypatch.setattr(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(flashmla_sparse, "current_workspace_manager", MagicMock(name="workspaces"))


def leave_memory_as_it_was(monkeypatch):
    """Make memory that vLLM's builder allocates and never writes differ between builders, as on a device."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadataBuilder

    make, left = FlashMLASparseMetadataBuilder.__init__, count(1)

    def over_old_memory(self, *args):
        make(self, *args)
        self.dummy_block_table.fill_(next(left))

    monkeypatch.setattr(FlashMLASparseMetadataBuilder, "__init__", over_old_memory)


class SparseRunner(LatentRunner):
    """The layer's group by name and its indexer's, with the backend vLLM's layer picks, over one block table."""

    page = 64

    def __init__(self, kv_cache_dtype="auto", name=SPARSE):
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
        from vllm.v1.kv_cache_interface import MLAAttentionSpec
        from vllm.v1.worker.utils import AttentionGroup

        from engine_kits.vllm.config import LAYER, config_of
        from engine_kits.vllm.making import index_group

        spec = make_spec(num_q_heads=HEADS, num_kv_heads=1, head_dim=576, page_size=self.page)
        self.config, self.query_len, self.layer_name = deepcopy(config_of(spec, TOKENS)), 1, LAYER
        self.causal, self.window = True, None
        model, self.config.cache_config.cache_dtype = self.config.model_config, kv_cache_dtype
        dims = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        model.hf_text_config.update({**dims, "q_lora_rank": None, "index_topk": TOPK})
        model.model_arch_config.head_size = 576
        self.config.compilation_config.static_forward_context = {LAYER: SimpleNamespace(prefill_backend=None)}
        packed = {"state_content_bytes": 656, "dtype": torch.uint8} if kv_cache_dtype == FP8 else {}
        group = MLAAttentionSpec(
            block_size=self.page, num_kv_heads=1, head_size=576, **{"dtype": torch.bfloat16, **packed}
        )
        names = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "kv_b_proj")
        backend = backend_of(name)
        self.topk = torch.full((self.ROWS, TOPK), -1, dtype=torch.int32)
        with set_current_vllm_config(self.config), default_dtype(torch.bfloat16):
            self.impl = backend.get_impl_cls()(
                num_heads=HEADS, head_size=576, scale=SCALE, num_kv_heads=1, kv_cache_dtype=kv_cache_dtype, **dims,
                **dict.fromkeys(names), attn_type="decoder", q_lora_rank=None, qk_head_dim=192,
                topk_indices_buffer=self.topk,
            )  # fmt: skip
            self.group = AttentionGroup(backend, [LAYER], group, 0)
            theirs = DeepseekV32IndexerCache.get_attn_backend(None)
            self.indexer = AttentionGroup(theirs, [INDEXER], index_group(spec), 0)
        self.remake()
        self.allocate()
        width = self.indexer.get_metadata_builder().expanded_block_table_buffer.shape[1]
        self.table = torch.zeros(self.ROWS, width, dtype=torch.int32)
        seeded = torch.Generator().manual_seed(0)
        latents = torch.randn(100, self.page, 576, generator=seeded).bfloat16()
        self.cache = pack(latents) if kv_cache_dtype == FP8 else latents
        self.latents = unpack(self.cache) if kv_cache_dtype == FP8 else latents
        self.index_keys = torch.randn(100, self.page, INDEX_DIM, generator=seeded).double()

    @property
    def groups(self):
        return [self.group, self.indexer]

    def remake(self):
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            for group in self.groups:
                group.create_metadata_builders(self.config, CPU, kernel_block_size=self.page)

    def draft(self, metadata, query):
        """The indexer chooses among the tokens its metadata shows, then the layer attends to those."""
        decode = metadata[INDEXER].decode
        rows = len(decode.block_table)
        keys = self.index_keys[decode.block_table.long()].flatten(1, 2)
        scores = torch.einsum("rd,rnd->rn", query[:rows, 0, :INDEX_DIM].double(), keys)
        seen, position = decode.seq_lens.view(rows, -1)[:, -1:], torch.arange(keys.shape[1])
        scheduled = decode.schedule_metadata[:rows]
        live = (position < seen) & (position < scheduled[:, :1]) & (position < scheduled[:, 1:] * self.page)
        best, chosen = scores.masked_fill(~live, -torch.inf).topk(TOPK)
        self.topk[:rows].copy_(torch.where(best.isinf(), -1, chosen))
        return self.attend(metadata[self.layer_name], query)

    def truth(self, query, lens):
        rows = []
        for row, length in enumerate(lens):
            pages = self.table[row, : -(-length // self.page)].long()
            latents, keys = (each[pages].flatten(0, 1)[:length].double() for each in (self.latents, self.index_keys))
            chosen = (keys @ query[row, 0, :INDEX_DIM].double()).topk(min(TOPK, length)).indices
            weights = (query[row].double() @ latents[chosen].T * SCALE).softmax(-1)
            rows.append(weights @ latents[chosen, :512])
        return torch.stack(rows)
