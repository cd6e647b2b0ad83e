"""A vLLM builder behind this library's contract: its build, its in-place update, and its claims as they are."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionBatch,
    AttentionSpec,
    BatchMetadataBuilder,
    HostLengths,
)
from engine_kits.records import Inner, record_of, tensors_in
from spec_decode.testing.outcome import Unsupported


class EngineBuilder(BatchMetadataBuilder[Any]):
    """Plays vLLM's runner: it keeps the input buffers as vLLM does, and calls the builder as vLLM does.

    Page p of the kit is block p + 1 of vLLM, whose block 0 is the null block, which padding owns and nothing can write.
    """

    host_lengths = HostLengths.UPPER_BOUND
    scratch: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of tensors whose content has no meaning between two kernels."""

    @staticmethod
    def make(spec: AttentionSpec, device: torch.device, block_table_width: int) -> Any:
        """Make vLLM's builder for a KV group of this spec, for tables of block_table_width blocks per row.

        Raises NotImplementedError: the class of each vLLM builder has its own.
        """
        raise NotImplementedError

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        # The claim belongs to an instance.
        if cls.make(spec, device, 1).supports_draft_decode_metadata_update:
            return AdvanceSupport(AdvanceLevel.IN_GRAPH, "it says supports_draft_decode_metadata_update")
        return AdvanceSupport(AdvanceLevel.REBUILD, "it does not say supports_draft_decode_metadata_update")

    def allocate(self) -> None:
        pages = -(-self.max_seq_len // self.spec.page_size)
        self.inner = self.make(self.spec, self.device, pages)
        self._blocks = torch.zeros(self.max_reqs, pages, dtype=torch.int32, device=self.device)
        self._slots = torch.full((self.max_tokens,), -1, dtype=torch.int64, device=self.device)

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> Any:
        self.check_horizon(batch, horizon)
        self._fill_inputs(batch)
        metadata = self.inner.build(0, self._common(batch))
        host = {name: getattr(batch, name) for name in ("num_reqs", "num_tokens", "max_query_len", "max_seq_len")}
        return record_of(self.tensors_of(metadata), **host, inner=Inner(metadata, batch))

    def advance(self, metadata: Any) -> None:
        """Update in place. Raises Unsupported for more than one token per request, for which vLLM never calls it."""
        if metadata.max_query_len > 1:
            raise Unsupported("vLLM updates metadata in place for decodes of one token, this batch has more")
        self._fill_inputs(metadata.inner.batch)
        self.inner.update_draft_decode_metadata(metadata.inner.metadata)

    def tensors_of(self, metadata: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of vLLM's metadata that a captured graph holds, by name; nested names are joined by _."""
        return {
            name: tensor for name, tensor in tensors_in(metadata).items() if not name.startswith(self.scratch or ("/",))
        }

    def _fill_inputs(self, batch: AttentionBatch) -> None:
        """Fill the block table and slots, as vLLM's runner does before a build or update."""
        blocks, slots = self._inputs(batch)
        torch.add(batch.block_table, 1, out=blocks)
        slots.copy_(torch.where(batch.slot_mapping < 0, -1, batch.slot_mapping + self.spec.page_size))

    def _inputs(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        width = batch.block_table.shape[1]
        return self._blocks[: batch.num_reqs, :width], self._slots[: batch.num_tokens]

    def _common(self, batch: AttentionBatch) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        assert batch.host_seq_lens is not None and batch.host_query_lens is not None
        blocks, slots = self._inputs(batch)
        starts = torch.tensor([0, *batch.host_query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=starts,
            seq_lens=batch.seq_lens,
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            block_table_tensor=blocks,
            slot_mapping=slots,
            positions=batch.positions,
            is_prefilling=torch.zeros(batch.num_reqs, dtype=torch.bool),
            seq_lens_cpu_upper_bound=torch.tensor(batch.host_seq_lens, dtype=torch.int32),
        )
