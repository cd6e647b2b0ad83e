"""A draft's decode steps in SGLang: one view per step over a single state, which advances inside the graph.

SGLang wants a whole attention backend per step, plans all of them before a graph replay, and keeps indices of every
request and step for that. Here all steps share one table, one vector of lengths and one builder's metadata; the first
layer of a step advances them, and a capture records that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

import attn_backends
from attn_backends import KVCache, Rejected
from attn_backends.engines.sglang.kernels.load_tables import load_tables
from attn_backends.engines.sglang.v0_5_23.reasons import UnsupportedDraft, layer_reasons, reasons_against
from builders import AdvanceLevel, AttentionBatch, AttentionSpec, MetadataBuilder, check_batch
from builders.batch import NO_SLOT
from builders.errors import require


class DraftSteps:
    """What SGLang holds for a draft: `attn_backends`, one view for each step but the last, which only samples.

    Made once per runner; SGLang's graph runner captures `init_forward_metadata_in_graph` and the views' forwards.
    """

    needs_cpu_seq_lens = False
    prefill_attention_backend_str: str | None = None
    decode_attention_backend_str: str | None = None

    def __init__(
        self, backend: attn_backends.AttentionBackend, runner: Any, specs: Mapping[int, AttentionSpec], num_steps: int
    ) -> None:
        """runner: SGLang's ModelRunner of the draft. specs: from `layer_specs`. num_steps: tokens drafted, >= 2."""
        self.backend, self.num_steps = backend, num_steps
        self.device = torch.device(runner.device)
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.kv_index_translator = runner.kv_index_translator
        self.page_size = int(runner.token_to_kv_pool.page_size)
        self.specs = specs
        self.attn_backends = [StepView(self, step) for step in range(num_steps - 1)]
        self.step = self.rows = 0
        self._allocate(self.req_to_token_pool.size)

    @classmethod
    def of(cls, name: str, runner: Any, *, topk: int, num_steps: int) -> DraftSteps:
        """Make the steps for a registered backend name. Raises UnsupportedDraft, with every reason."""
        reasons = [*reasons_against(runner, topk=topk), *layer_reasons(runner, attention_layers(runner))]
        try:
            backend = attn_backends.get(name)
        except attn_backends.BackendError as error:
            raise UnsupportedDraft.because(name, [*reasons, str(error)]) from error
        device = torch.device(runner.device)
        specs = {} if reasons else layer_specs(runner)
        for spec in set(specs.values()):
            if isinstance(answer := backend.supports(spec, device), Rejected):
                reasons += answer.reasons
            support = backend.builder.advance_support(spec, device)
            if support.level is not AdvanceLevel.IN_GRAPH:
                reasons.append(f"its metadata does not advance in a graph: {support.reason}")
        if reasons:
            raise UnsupportedDraft.because(name, reasons)
        return cls(backend, runner, specs, num_steps)

    def _allocate(self, max_reqs: int) -> None:
        self.max_seq_len = int(self.req_to_token_pool.req_to_token.shape[1])
        pages = -(-self.max_seq_len // self.page_size)
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=self.device)
        self.block_table = torch.zeros(max_reqs, pages, dtype=torch.int32, device=self.device)
        self.query_start_loc = torch.arange(max_reqs + 1, dtype=torch.int32, device=self.device)
        self.no_slots = torch.full((max_reqs,), NO_SLOT, dtype=torch.int64, device=self.device)
        self.builders: dict[AttentionSpec, MetadataBuilder[Any]] = {
            spec: self.backend.builder(
                spec, self.device, max_reqs=max_reqs, max_tokens=max_reqs, max_seq_len=self.max_seq_len
            )
            for spec in set(self.specs.values())
        }
        self.metadata: dict[AttentionSpec, Any] = {}

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for the largest batch that is captured."""
        if max_bs > len(self.seq_lens):
            self._allocate(max_bs)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Do the same eagerly, without a graph. Raises as `init_forward_metadata_in_graph` does."""
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Do nothing: a replay plans nothing outside its graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Set the state of step 0 with one kernel, from the current lengths and table on the device.

        Raises BatchError for a batch with too many rows, and for tensors that a kernel would misread.
        """
        rows = int(forward_batch.batch_size)
        require(
            rows <= len(self.seq_lens),
            f"a draft has tables for {len(self.seq_lens)} requests, got a batch of {rows}; its last rows would have no "
            "pages. Lower --max-running-requests or the largest batch of --cuda-graph-bs.",
        )
        load_tables(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices[:rows],
            forward_batch.seq_lens[:rows],
            self.seq_lens,
            self.block_table,
            self.page_size,
            self.num_steps - 1,
        )
        batch = AttentionBatch(
            num_reqs=rows,
            num_tokens=rows,
            max_query_len=1,
            max_seq_len=self.max_seq_len,
            uniform=True,
            query_start_loc=self.query_start_loc[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            positions=forward_batch.positions[:rows],
            block_table=self.block_table[:rows],
            slot_mapping=self.no_slots[:rows],
        )
        check_batch(batch, self.device)
        horizon = self.num_steps - 2
        self.metadata = {spec: builder.build(batch, horizon=horizon) for spec, builder in self.builders.items()}
        self.step, self.rows = 0, rows

    def enter(self, step: int) -> None:
        """Advance the state to a step, once for all of its layers.

        Raises BatchError for a step before the current one, which means a view of another round is in use.
        """
        require(
            step >= self.step,
            f"draft steps must run in order, got step {step} after {self.step}; it would see tokens that do not exist "
            "yet. Begin each round with init_forward_metadata.",
        )
        for _ in range(step - self.step):
            self.seq_lens[: self.rows].add_(1)
            for spec, builder in self.builders.items():
                builder.advance(self.metadata[spec])
        self.step = step


class StepView(AttentionBackend):
    """The attention backend that SGLang sees for one step."""

    needs_cpu_seq_lens = False

    def __init__(self, steps: DraftSteps, step: int) -> None:
        self.steps, self.speculative_step_id = steps, step
        self.token_to_kv_pool, self.req_to_token_pool = steps.token_to_kv_pool, steps.req_to_token_pool
        self.kv_index_translator = steps.kv_index_translator

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: all steps share the state of DraftSteps."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the context length of a padding row, which attends to a slot that nobody reads."""
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> torch.Tensor:
        """Store keys and values at SGLang's write location, and attend; returns [rows, heads * value dim].

        Raises BatchError for layer inputs that are not part of its spec, such as sinks.
        """
        unsupported = sorted(name for name, value in extras.items() if value is not None)
        require(
            not unsupported,
            f"a draft layer must have no inputs outside its spec, got {', '.join(unsupported)}; they would be lost. "
            "Choose one of SGLang's own backends for the draft.",
        )
        steps = self.steps
        steps.enter(self.speculative_step_id)
        pool, spec = self.token_to_kv_pool, steps.specs[layer.layer_id]
        if save_kv_cache:
            location = KVWriteLoc.for_batch(forward_batch)
            key, value = (
                k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            )
            pool.set_kv_buffer(layer, location, key, value, layer.k_scale, layer.v_scale)
        by_page = (-1, steps.page_size)
        cache = KVCache(
            pool.get_key_buffer(layer.layer_id).unflatten(0, by_page),
            pool.get_value_buffer(layer.layer_id).unflatten(0, by_page),
        )
        query = q.view(-1, spec.num_q_heads, spec.head_dim)
        return steps.backend.forward(query, cache, steps.metadata[spec], spec=spec).flatten(1)


def attention_layers(runner: Any) -> list[RadixAttention]:
    return [module for module in runner.model.modules() if isinstance(module, RadixAttention)]


def layer_specs(runner: Any) -> dict[int, AttentionSpec]:
    """Return the spec of each of a draft's layers by layer id, with the heads of this rank."""
    return {
        layer.layer_id: AttentionSpec(
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            value_dim=layer.v_head_dim,
            page_size=int(runner.token_to_kv_pool.page_size),
            dtype=runner.dtype,
            # SGLang's window excludes the query's own token.
            sliding_window=layer.sliding_window_size + 1 if layer.sliding_window_size > -1 else None,
            scale=float(layer.scaling),
            soft_cap=layer.logit_cap or None,
        )
        for layer in attention_layers(runner)
    }
