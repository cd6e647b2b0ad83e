"""vLLM's runner as its builders see it: persistent buffers of one KV group, its groups over them, and an fp64 oracle.

Needs vLLM's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for vLLM's own Triton kernels.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from scripts import vllm_worker
from tests.engines.released import needs
from tests.factories import CPU, make_spec

NEEDS_VLLM = [
    needs("vllm", "0.33"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="vLLM's kernels need TRITON_INTERPRET=1 here"),
    pytest.mark.usefixtures("vllm_inside", "vllm_flashinfer", "vllm_kernels"),
]
"""Marks of a module of tests inside vLLM."""
PAGE, WIDTH, TOKENS = 16, 12, 4
HEADS, KV_HEADS, DIM = 4, 2, 64
PAGED = ("ATTN_BACKENDS_TRITON_PAGED", "FLASHINFER_IN_GRAPH", "ATTN_BACKENDS_FLASH_ATTN3")
LATENT = ("ATTN_BACKENDS_TRITON_MLA", "ATTN_BACKENDS_FLASH_ATTN3_MLA", "ATTN_BACKENDS_FLASHMLA")
SPARSE = "FLASHMLA_SPARSE_IN_GRAPH"
LATENT_LAYER = {"head_size": 576, "use_mla": True, "block_size": 64}
LAYERS = {**dict.fromkeys(LATENT, LATENT_LAYER), SPARSE: {**LATENT_LAYER, "use_sparse": True}}
"""Layers of DeepSeek-V3 and V3.2 for the selector; the others are Llama's."""


def backend_of(name):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name].get_class()


def select(name, **changes):
    """Return the platform's choice for a layer that the backend supports except for these changes."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from engine_kits.vllm.config import config_of

    options = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    options |= LAYERS.get(name, {}) | changes
    with set_current_vllm_config(config_of(make_spec(head_dim=DIM, page_size=PAGE), TOKENS)):
        return current_platform.get_attn_backend_cls(AttentionBackendEnum[name], AttentionSelectorConfig(**options))


class Runner:
    """vLLM's persistent buffers of one KV group, and its own AttentionGroup over them, for up to 8 rows."""

    ROWS, page = 8, PAGE
    head_dim = value_dim = DIM

    def __init__(
        self,
        name,
        query_len=1,
        dtype=torch.bfloat16,
        kernel_block=PAGE,
        block=PAGE,
        ranks=1,
        *,
        causal=True,
        window=None,
        kv="auto",
    ):
        """kv: vLLM's name of the cache's dtype."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm.v1.worker.utils import AttentionGroup

        from engine_kits.vllm.config import LAYER, config_of

        heads = {"num_q_heads": ranks * HEADS, "num_kv_heads": ranks * KV_HEADS}
        self.config = config_of(make_spec(**heads, head_dim=DIM, page_size=PAGE), TOKENS)
        self.config.cache_config.kv_cache_layout = "LBNHC"
        self.query_len, self.layer_name, self.causal, self.window = query_len, LAYER, causal, window
        backend = backend_of(name)
        group = FullAttentionSpec(block_size=block, num_kv_heads=KV_HEADS, head_size=DIM, dtype=dtype)
        with set_current_vllm_config(self.config), default_dtype(dtype):
            numbers = (HEADS, DIM, DIM**-0.5, KV_HEADS, None, window, kv, None)
            self.layer = layer_of(backend.get_impl_cls()(*numbers))
            self.config.compilation_config.static_forward_context = {LAYER: self.layer}
            self.group = AttentionGroup(backend, [LAYER], group, 0)
        self.remake(kernel_block)
        self.allocate()
        self.cache = torch.randn(100, KV_HEADS, PAGE, 2 * DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.scales = (1.0, 1.0)
        if kv != "auto":
            self.scales, self.cache = (0.7, 3.0), self.cache.to(torch.float8_e4m3fn).view(torch.uint8)
            for name, scale in zip(("_k_scale", "_v_scale"), self.scales, strict=True):
                getattr(self.layer, name).fill_(scale)
                setattr(self.layer, f"{name}_float", scale)

    def remake(self, kernel_block=None):
        """Make the group's builders again, as vLLM does."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            self.group.create_metadata_builders(self.config, CPU, kernel_block_size=kernel_block or self.page)

    def allocate(self):
        query_len = self.query_len
        self.seq_lens = torch.zeros(self.ROWS, dtype=torch.int32)
        self.table = torch.zeros(self.ROWS, WIDTH, dtype=torch.int32)
        self.slots = torch.full((self.ROWS * query_len,), -1)
        self.positions = torch.zeros(self.ROWS * query_len, dtype=torch.int64)
        self.starts = torch.arange(self.ROWS + 1, dtype=torch.int32) * query_len

    @property
    def builder(self):
        return self.group.get_metadata_builder()

    @property
    def groups(self):
        """All of the draft's groups in this KV group."""
        return [self.group]

    def fill(self, lens, seed=0):
        """Fill rows of these lengths, each over its own pages; the others are padding, as vLLM leaves it."""
        pages = torch.randperm(99, generator=torch.Generator().manual_seed(seed)).int() + 1
        self.seq_lens.zero_()
        self.seq_lens[: len(lens)] = torch.tensor(lens)
        self.table[: len(lens), :WIDTH] = pages[: len(lens) * WIDTH].view(-1, WIDTH)

    def common(self, rows=None):
        from vllm.v1.attention.backend import CommonAttentionMetadata

        rows = rows or self.ROWS
        live = int((self.seq_lens[:rows] > 0).sum())
        starts = torch.arange(rows + 1, dtype=torch.int32).clamp(max=live) * self.query_len
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: rows + 1],
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens[:rows],
            num_reqs=rows,
            num_actual_tokens=rows * self.query_len,
            max_query_len=self.query_len,
            max_seq_len=WIDTH * self.page,
            block_table_tensor=self.table[:rows],
            slot_mapping=self.slots[: rows * self.query_len],
            positions=self.positions[: rows * self.query_len],
            seq_lens_cpu_upper_bound=self.seq_lens[:rows].clone(),
            causal=self.causal,
        )

    def attend(self, metadata, query):
        """Run the layer's own forward, as vLLM calls it."""
        out = torch.zeros_like(query)
        call = (self.layer, query, None, None, self.cache, metadata)
        self.layer.impl.forward(*call, output=out, output_scale=None, output_block_scale=None)
        return out

    def draft(self, metadata, query):
        """Run a draft's layer on its part of the metadata."""
        return self.attend(metadata[self.layer_name], query)

    def truth(self, query, lens):
        """Compute the live rows' attention in fp64, from only their lengths and tables."""
        stored = self.cache.view(torch.float8_e4m3fn).float() if self.cache.dtype is torch.uint8 else self.cache
        key, value = (part.double() for part in stored.transpose(1, 2).split(DIM, -1))
        key, value = key * self.scales[0], value * self.scales[1]
        rows = []
        for row, length in enumerate(lens):
            pages = self.table[row, : -(-length // PAGE)].long()
            its_key, its_value = (each[pages].flatten(0, 1)[:length].repeat_interleave(2, 1) for each in (key, value))
            for token in range(self.query_len):
                seen = self.seen(length, token)
                q = query[row * self.query_len + token].double()
                weights = (torch.einsum("hd,shd->hs", q, its_key[seen]) * DIM**-0.5).softmax(-1)
                rows.append(torch.einsum("hs,shd->hd", weights, its_value[seen]))
        return torch.stack(rows)

    def seen(self, length, token):
        """Return the tokens a query token sees: a block's window is symmetric, as in vLLM's FLASH_ATTN."""
        position, window = length - self.query_len + token, self.window or length
        last = position if self.causal else min(length - 1, position + window - 1)
        return slice(max(0, position - window + 1), last + 1)


class default_dtype:
    """Sets the model's dtype as the default: vLLM makes layers that way."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error):
        torch.set_default_dtype(self.before)


def layer_of(impl):
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layer = type("Layer", (AttentionLayerBase,), dict.fromkeys(AttentionLayerBase.__abstractmethods__))()
    layer.impl = impl
    for name in ("_q_scale", "_k_scale", "_v_scale"):
        setattr(layer, name, torch.tensor(1.0, dtype=torch.float32))
        setattr(layer, f"{name}_float", 1.0)
    return layer


def assert_attends(runner, metadata, lens, rows=Runner.ROWS):
    shape, seeded = (rows * runner.query_len, HEADS, runner.head_dim), torch.Generator().manual_seed(9)
    query = torch.randn(shape, generator=seeded).bfloat16()
    found = runner.attend(metadata, query)[: len(lens) * runner.query_len].double()
    torch.testing.assert_close(found, runner.truth(query, lens), atol=2e-2, rtol=2e-2)


class Tables:
    """vLLM's block tables of one KV group; row i belongs to request i, and the buffers never move."""

    cp_size = 1

    def __init__(self, runner):
        self.input_block_tables, self.page = [runner.table], runner.page
        self.slot_mappings = runner.slots[None]

    def get_dummy_block_tables(self, num_reqs):
        return [self.input_block_tables[0].zero_()[:num_reqs]]

    def get_dummy_slot_mappings(self, num_tokens):
        return self.slot_mappings.fill_(-1)[:, :num_tokens]

    def compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out=None):
        out = self.slot_mappings if out is None else out
        pages = self.input_block_tables[0][: len(positions)].gather(1, (positions // self.page)[:, None])[:, 0]
        out.fill_(-1)
        out[0, : len(positions)] = torch.where(idx_mapping >= 0, pages * self.page + positions % self.page, -1)
        return out[:, :num_tokens_padded]


class LatentRunner(Runner):
    """A runner over latents of 512 + 64 dims, in the smallest pages that the kernels read, with the layer's decode."""

    head_dim, value_dim = 576, 512

    def __init__(self, name, query_len=1, *, causal=True, window=None, kv_lora_rank=512, **extras):
        from vllm.config import set_current_vllm_config
        from vllm.v1.kv_cache_interface import MLAAttentionSpec
        from vllm.v1.worker.utils import AttentionGroup

        from engine_kits.vllm.config import LAYER, config_of

        backend = backend_of(name)
        self.page = backend.get_preferred_block_size(PAGE)
        spec = make_spec(num_q_heads=HEADS, num_kv_heads=1, head_dim=576, page_size=self.page)
        self.config, self.query_len, self.layer_name = config_of(spec, TOKENS), query_len, LAYER
        self.causal, self.window = causal, window
        self.config.model_config.model_arch_config.head_size = 576
        dims = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        prefill = SimpleNamespace(clone=lambda: None)
        layer = SimpleNamespace(
            **dims, q_lora_rank=None, prefill_backend=prefill, non_causal_multi_token_decode=not causal
        )
        self.config.compilation_config.static_forward_context = {LAYER: layer}
        group = MLAAttentionSpec(block_size=self.page, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        with set_current_vllm_config(self.config), default_dtype(torch.bfloat16):
            names = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")
            numbers = {"num_heads": HEADS, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "kv_cache_dtype": "auto"}
            layer_of_it = {**dict.fromkeys(names), **numbers, "attn_type": "decoder", **dims, **extras}
            self.impl = backend.get_impl_cls()(**layer_of_it, q_lora_rank=None, qk_head_dim=192, kv_b_proj=None)
            self.group = AttentionGroup(backend, [LAYER], group, 0)
        self.remake()
        self.allocate()
        self.cache = torch.randn(100, self.page, 576, generator=torch.Generator().manual_seed(0)).bfloat16()

    def common(self, rows=None):
        return super().common(rows).replace(is_prefilling=torch.zeros(rows or self.ROWS, dtype=torch.bool))

    def attend(self, metadata, query):
        return self.impl.forward_mqa(query, self.cache, metadata, None)[0]

    def truth(self, query, lens):
        rows = []
        for row, length in enumerate(lens):
            pages = self.table[row, : -(-length // self.page)].long()
            latents = self.cache[pages].flatten(0, 1)[:length].double()
            for token in range(self.query_len):
                seen = latents[self.seen(length, token)]
                weights = (query[row * self.query_len + token].double() @ seen.T * 0.1).softmax(-1)
                rows.append(weights @ seen[:, :512])
        return torch.stack(rows)


def make_runner(name, query_len=1, **options):
    """Return a runner over heads or latents, as the backend requires."""
    return (LatentRunner if name in LATENT else Runner)(name, query_len, **options)


def weights_left(model, *, is_draft):
    """Yield parameters of a vLLM model that the figures' random weights do not fill completely."""
    for parameter in model.parameters():
        parameter.data.fill_(7)
    weights = vllm_worker.random_weights(model.config, is_draft=is_draft, seed=0, device=CPU)
    vllm_worker._load_in_place(model, weights)
    return {name for name, value in model.named_parameters() if bool((value == 7).any())}
