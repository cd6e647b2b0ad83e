"""The parts of a draft's runner that SGLang's draft backends use: its sizes, its pools, and one attention layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from builders import AttentionKind, AttentionSpec
from engine_kits.sglang.stand_in import STEPS


def runner_of(spec: AttentionSpec, max_reqs: int, max_seq_len: int) -> Any:
    """Return a draft's runner with one layer of this spec, for max_reqs requests of max_seq_len tokens.

    Its pools are SGLang's. Row r of a batch is request r + 1 of the pool; request 0 belongs to padding.
    """
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.runtime_context import get_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    get_context().override("the kit", page_size=spec.page_size)
    pages = -(-(max_seq_len + STEPS) // spec.page_size)
    width = pages * spec.page_size
    requests = ReqToTokenPool(size=max_reqs, max_context_len=width, device="cpu", enable_memory_saver=False)
    pool = _pool(spec)
    translator = KVIndexTranslator(
        req_to_token=requests.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=pool,
        page_size=spec.page_size,
        device="cpu",
        is_draft_worker=True,
    )
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        dtype=spec.dtype,
        kv_cache_dtype=spec.cache_dtype,
        kv_cache_dtype_str="auto",
        page_size=spec.page_size,
        server_args=get_context().server_args,
        # SGLang's window excludes the query's own token.
        sliding_window_size=None if spec.sliding_window is None else spec.window_left,
        use_mla_backend=spec.kind is AttentionKind.MLA,
        is_draft_worker=True,
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None,
        req_to_token_pool=requests,
        kv_index_translator=translator,
        attention_chunk_size=None,
        is_hybrid_swa=False,
        prefill_attention_backend_str=None,
        decode_attention_backend_str=None,
        decode_num_tokens_per_req=lambda: STEPS + 1,
        model_config=_model_config(spec, width),
        layer=_layer(spec),
    )


def _pool(spec: AttentionSpec) -> Any:
    """Return SGLang's pool for the spec. Its few slots are replaced by the kit's cache before it is used."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common = {
        "size": spec.page_size,
        "page_size": spec.page_size,
        "dtype": spec.cache_dtype,
        "layer_num": 1,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if spec.kind is AttentionKind.MLA:
        return MLATokenToKVPool(kv_lora_rank=spec.out_dim, qk_rope_head_dim=spec.head_dim - spec.out_dim, **common)
    return MHATokenToKVPool(head_num=spec.num_kv_heads, head_dim=spec.head_dim, **common)


def _model_config(spec: AttentionSpec, width: int) -> Any:
    from sglang.srt.configs.model_config import AttentionArch
    from transformers import PretrainedConfig

    latent = spec.kind is AttentionKind.MLA
    hf_config = PretrainedConfig(architectures=["LlamaForCausalLMEagle"], num_attention_heads=spec.num_q_heads)
    return SimpleNamespace(
        attention_arch=AttentionArch.MLA if latent else AttentionArch.MHA,
        context_len=width,
        dtype=spec.dtype,
        head_dim=spec.head_dim,
        v_head_dim=spec.out_dim,
        swa_v_head_dim=spec.out_dim,
        kv_lora_rank=spec.out_dim,
        qk_nope_head_dim=128,
        qk_rope_head_dim=spec.head_dim - spec.out_dim,
        scaling=spec.softmax_scale,
        num_attention_heads=spec.num_q_heads,
        get_max_num_attention_heads=lambda: spec.num_q_heads,
        get_num_kv_heads=lambda *sizes: spec.num_kv_heads,
        is_encoder_decoder=False,
        is_multimodal=False,
        is_local_attention_model=False,
        is_hybrid_swa=False,
        hf_config=hf_config,
        hf_text_config=hf_config,
        vocab_size=4096,
        linear_attn_registry_result=None,
    )


def _layer(spec: AttentionSpec) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(
        num_heads=spec.num_q_heads,
        head_dim=spec.head_dim,
        scaling=spec.softmax_scale,
        num_kv_heads=spec.num_kv_heads,
        layer_id=0,
        v_head_dim=spec.out_dim,
        sliding_window_size=-1 if spec.sliding_window is None else spec.window_left,
    )


def slots_of(block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots of each request's tokens, [rows, pages * page_size]; the kit's page p is p + 1 in the pool."""
    return ((block_table[:, :, None] + 1) * page_size + torch.arange(page_size)).flatten(1)
