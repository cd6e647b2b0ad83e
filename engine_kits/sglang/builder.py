"""An SGLang draft backend behind this library's contract: rounds are planned the way SGLang's graph runner plans them.

SGLang gives each draft step its own backend, and plans all of them before it replays the one graph of their steps. In
the kit's terms the steps are preplanned: nothing advances inside the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from attn_backends import KVCache
from attn_backends.base import Sinks
from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionBatch,
    AttentionSpec,
    CaptureConstants,
    GraphSupport,
    MetadataBuilder,
)
from engine_kits.engine_cache import EngineCache, with_null_page
from engine_kits.sglang.runner import runner_of, slots_of
from engine_kits.sglang.stand_in import STEPS, on_an_h200
from spec_decode.testing.outcome import Unsupported


class PlannedSteps(MetadataBuilder[Any]):
    """Plays the graph runner of SGLang's EAGLE worker: its static inputs, and its calls of the draft's backend.

    The kit's lengths count the query token, SGLang's are those before the round: its step i sees length + i + 1 tokens.
    """

    graph_support = GraphSupport.SINGLE_TOKEN_DECODE
    build_per_round = True

    step_fields = ()  # each step has separate metadata
    held_as: ClassVar[str] = "forward_metadata"
    """The attribute in which a step's backend holds its metadata."""

    @staticmethod
    def make(runner: Any) -> Any:
        """Make SGLang's container with one backend per step. Raises NotImplementedError: each subject has its own."""
        raise NotImplementedError

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, torch.Tensor]:
        """Return what a step's kernels read for the first `live` rows, by name; the rest is padding.

        metadata: of the step's backend. batch: SGLang's batch for the step. Raises NotImplementedError, like `make`.
        """
        raise NotImplementedError

    @staticmethod
    def slots(metadata: Any, batch: Any) -> Sequence[torch.Tensor]:
        """Return the slots that a step's kernels use for each row's text, in order; with a window, for its end.

        metadata, batch: as in `kernel_inputs`. Raises NotImplementedError, like `make`.
        """
        raise NotImplementedError

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.PREPLANNED, "SGLang has a backend for each step, and plans all of them")

    def allocate(self) -> None:
        rows = self.max_reqs
        with on_an_h200():
            self.runner = runner_of(self.spec, rows, self.max_seq_len)
            self.steps = self.make(self.runner)
            self.steps.init_cuda_graph_state(rows, rows)
            self._padding = self.steps.attn_backends[0].get_cuda_graph_seq_len_fill_value()
        self._requests = torch.zeros(rows, dtype=torch.int64)
        self._seq_lens = torch.full((rows,), self._padding, dtype=torch.int64)
        self._positions = torch.zeros(rows, dtype=torch.int64)
        self._write_at = torch.zeros(rows, STEPS, dtype=torch.int64)

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> PlannedStep:
        """Build a round's first step over the batch, on which its capture ran too. Raises Unsupported as `plan`
        does."""
        self.check_horizon(batch, horizon)
        self.plan_capture(batch.num_reqs, batch)
        self.plan(batch)
        self.begin(batch.num_reqs)
        return self.step(batch.num_reqs, 0)

    def plan_capture(self, rows: int, batch: AttentionBatch | None = None) -> None:
        """Plan a round's steps for a capture; without a batch, over rows of padding, as SGLang captures.

        Raises Unsupported for more than one token per request.
        """
        self._load(rows, batch)
        known = [0] * rows if batch is None else batch.host_seq_lens
        with on_an_h200():
            self.steps.init_forward_metadata_out_graph(self._batch(rows, known), in_capture=True)

    def plan(self, batch: AttentionBatch) -> None:
        """Plan a round's steps over the batch before a replay. Raises Unsupported as `plan_capture` does."""
        self._load(batch.num_reqs, batch)
        known = batch.host_seq_lens if getattr(self.steps, "needs_cpu_seq_lens", True) else None
        with on_an_h200():
            self.steps.init_forward_metadata_out_graph(self._batch(batch.num_reqs, known))

    def begin(self, rows: int) -> None:
        """Run the part of a round that its graph captures before the steps."""
        with on_an_h200():
            self.steps.init_forward_metadata_in_graph(self._batch(rows))

    def end_warm_up(self) -> None:
        """Run SGLang's hook between the warm-up round and the capture."""
        if hasattr(self.steps, "on_after_cuda_graph_warmup"):
            with on_an_h200():
                self.steps.on_after_cuda_graph_warmup()

    def step(self, rows: int, step: int) -> PlannedStep:
        """Return a step of the round that was planned last, with its backend's current metadata."""
        view, backend = self._batch(rows), self.steps.attn_backends[step]
        # A copy, as SGLang makes one in its graph: kernels read contiguous slots.
        view.out_cache_loc = self._write_at[:rows, step].contiguous()
        view.page_size, view.window = self.spec.page_size, self.spec.sliding_window or 0
        return PlannedStep(self, backend, getattr(backend, self.held_as), view)

    def capture_constants(self, metadata: Any) -> CaptureConstants:
        return CaptureConstants(max_reqs=metadata.batch.batch_size, max_query_len=1, max_seq_len=self.max_seq_len)

    def _load(self, rows: int, batch: AttentionBatch | None = None) -> None:
        """Fill the static inputs for a round over the batch; None for a capture, whose rows are all padding."""
        if batch is not None and batch.max_query_len > 1:
            raise Unsupported("SGLang drafts one token of a request in a step, this batch has more")
        if batch is None:
            self._requests[:rows].zero_()
            self._positions[:rows].zero_()
            self._write_at[:rows].zero_()
            self._seq_lens[:rows].fill_(self._padding)
            return
        table = self.runner.req_to_token_pool.req_to_token
        slots = slots_of(batch.block_table, self.spec.page_size)[:, : table.shape[1]]
        table[1 : rows + 1].zero_()
        table[1 : rows + 1, : slots.shape[1]] = slots
        live, cached = batch.seq_lens > 0, (batch.seq_lens - 1).clamp(min=0).long()
        self._requests[:rows] = torch.where(live, torch.arange(1, rows + 1), 0)
        self._seq_lens[:rows] = torch.where(live, cached, self._padding)
        self._positions[:rows] = cached
        # Padding writes to slot 0.
        drafted = table[1 : rows + 1].long().gather(1, cached[:, None] + torch.arange(STEPS))
        self._write_at[:rows] = torch.where(live[:, None], drafted, 0)

    def _batch(self, rows: int, host_seq_lens: Sequence[int] | None = None) -> Any:
        """Return SGLang's batch of a round, over the static inputs."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        known = None
        if host_seq_lens is not None:
            known = torch.tensor([length - 1 if length else self._padding for length in host_seq_lens])
        return SimpleNamespace(
            batch_size=rows,
            forward_mode=ForwardMode.DECODE,
            input_ids=None,
            req_pool_indices=self._requests[:rows],
            seq_lens=self._seq_lens[:rows],
            seq_lens_cpu=known,
            seq_lens_sum=None if known is None else int(known.sum()),
            encoder_lens=None,
            positions=self._positions[:rows],
            out_cache_loc=self._write_at[:rows].flatten(),
            out_cache_loc_is_physical=False,
            kv_loc_plan=None,
            kv_loc_cols=None,
            spec_info=EagleDraftInput(num_tokens_per_req=1),
        )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The inputs of a step's attention: its backend, the metadata that its graph holds, and SGLang's batch."""

    builder: PlannedSteps
    backend: Any
    metadata: Any
    batch: Any

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Where the step writes: this comes from its batch, not from its backend's metadata."""
        slots: torch.Tensor = self.batch.out_cache_loc
        return slots

    def planned(self) -> Any:
        """Return the backend's current metadata, after another plan."""
        return getattr(self.backend, self.builder.held_as)

    def kernel_inputs(self, live: int) -> dict[str, torch.Tensor]:
        return self.builder.kernel_inputs(self.metadata, self.batch, live)

    def slots(self) -> list[list[int]]:
        return [row.tolist() for row in self.builder.slots(self.metadata, self.batch)]

    def attend(self, query: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Run SGLang's own forward over the kit's cache; returns [rows, heads, value dim]."""
        pool, layer = self.builder.runner.token_to_kv_pool, self.builder.runner.layer
        _attach_cache(pool, cache)
        setattr(self.backend, self.builder.held_as, self.metadata)
        with on_an_h200():
            out = self.backend.forward_decode(query.flatten(1), None, None, layer, self.batch, save_kv_cache=False)
        heads: torch.Tensor = out.view(len(query), layer.tp_q_head_num, layer.v_head_dim)
        return heads


class DraftAttention(EngineCache):
    """Attends the way a step of SGLang's draft does."""

    def forward(
        self, query: torch.Tensor, cache: KVCache, metadata: Any, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> torch.Tensor:
        out: torch.Tensor = metadata.attend(query, cache)
        return out


def _attach_cache(pool: Any, cache: KVCache) -> None:
    """Point SGLang's pool at the kit's cache."""
    pages = with_null_page(cache)
    if hasattr(pool, "kv_buffer"):
        pool.kv_buffer[0] = pages.key.flatten(0, 1)
    else:
        pool.k_buffer[0], pool.v_buffer[0] = pages.key.flatten(0, 1), pages.value.flatten(0, 1)
