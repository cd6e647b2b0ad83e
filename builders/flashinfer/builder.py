"""FlashInfer's metadata: wrappers whose split plan is recomputed on the device, and the views that XQA reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, GraphSupport
from builders.errors import require
from builders.flashinfer.plan import replan
from builders.flashinfer.table_rows import row_stride
from builders.flashinfer.wrappers import FlashInferWrappers, Kernel, Launch
from builders.kernels.prefix_lens import count_prefix
from builders.metadata import BatchMetadata, BatchMetadataBuilder
from builders.spec import AttentionSpec

KEPT_TOKENS = 64
"""Shapes with at most this many query tokens per row, as drafts and their verification have, keep their plan for good.
Longer rows are prompts: a plan per prompt length would add up to gigabytes of device and pinned memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashInferMetadata(BatchMetadata):
    """The launch, its persistent buffers (empty if the kernel has no plan), and the lengths planned for.

    kv_lens        int32 [num_reqs]   tokens that the kernel attends to: seq_lens, or for trees the cached prefix
    last_page_len  int32 [num_reqs]
    plan           uint8 [n]          in FlashInfer's layout
    """

    launch: Launch
    kv_lens: torch.Tensor
    last_page_len: torch.Tensor
    plan: torch.Tensor


class FlashInferBuilder(BatchMetadataBuilder[FlashInferMetadata]):
    """Plans a batch shape once on the host, for any lengths; every build and advance replans it on the device. Plans
    for rows of more than KEPT_TOKENS query tokens are freed with their metadata.

    A batch whose query lengths differ is planned on the host for its own lengths, which syncs with the device.
    """

    graph_support = GraphSupport.UNIFORM_BATCH
    step_fields: ClassVar[tuple[str, ...]] = ("seq_lens", "slot_mapping", "kv_lens", "last_page_len", "plan")
    decode_kernel: ClassVar[Kernel | None] = None
    """The kernel for single-token batches; None chooses by the spec, see choose_kernel."""

    def allocate(self) -> None:
        self._launches: dict[tuple[int, ...], Launch] = {}
        self._prompt_launches: WeakValueDictionary[tuple[int, ...], Launch] = WeakValueDictionary()
        self.wrappers = FlashInferWrappers(self.spec, self.device)
        self._prefix_lens = torch.zeros(self.max_reqs, dtype=torch.int32, device=self.device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        kernel, why = (cls.decode_kernel, "requested") if cls.decode_kernel else choose_kernel(spec)
        how = "reads lengths and pages itself" if kernel is Kernel.XQA else "its split plan is recomputed on the device"
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, f"{kernel.value} ({why}): {how}")

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> FlashInferMetadata:
        self.check_horizon(batch, horizon)
        kv_lens = self._kv_lens(batch)
        launch = self._launch(batch) if batch.uniform else self.wrappers.ragged(batch, kv_lens)
        metadata = FlashInferMetadata(
            **self.batch_fields(batch),
            launch=launch,
            kv_lens=kv_lens,
            last_page_len=launch.last_page_len,
            plan=launch.plan,
        )
        if batch.uniform:
            self.advance(metadata)
        return metadata

    def advance(self, metadata: FlashInferMetadata) -> None:
        """See MetadataBuilder. Raises BatchError for a batch whose query lengths differ."""
        require(
            metadata.launch.kernel is not Kernel.RAGGED,
            f"only a batch with one query length advances, this one has up to {metadata.max_query_len} tokens per row "
            f"in {metadata.num_tokens} of {metadata.num_reqs} rows; its plan would be for other lengths. Rebuild it.",
        )
        if metadata.tree_masks is not None:
            count_prefix(metadata.kv_lens, metadata.seq_lens, metadata.query_start_loc)
        launch = metadata.launch
        if launch.layout is not None:
            tensors = (metadata.kv_lens, metadata.last_page_len, metadata.plan)
            replan(*tensors, launch.layout, row_stride=launch.row_stride)

    def length_bound(self, batch: AttentionBatch) -> int:
        """Return the tokens of a block-table row: a plan fits them all."""
        return batch.block_table.shape[1] * self.spec.page_size

    def _kv_lens(self, batch: AttentionBatch) -> torch.Tensor:
        if batch.tree_masks is None:
            return batch.seq_lens
        lens = self._prefix_lens[: batch.num_reqs]
        count_prefix(lens, batch.seq_lens, batch.query_start_loc)
        return lens

    def _launch(self, batch: AttentionBatch) -> Launch:
        """Return the launch for every batch of this shape over this block table."""
        table, trees = batch.block_table, batch.tree_masks is not None
        key = (*table.shape, row_stride(table), batch.max_query_len, trees, table.data_ptr())
        launches = self._launches if batch.max_query_len <= KEPT_TOKENS else self._prompt_launches
        launch = launches.get(key)
        if launch is None:
            launch = launches[key] = self._plan(batch)
        return launch

    def _plan(self, batch: AttentionBatch) -> Launch:
        if batch.max_query_len > 1 or batch.tree_masks is not None:
            return self.wrappers.extend(batch)
        kernel = self.decode_kernel or choose_kernel(self.spec)[0]
        return self.wrappers.xqa(batch) if kernel is Kernel.XQA else self.wrappers.decode(batch, kernel)


def choose_kernel(spec: AttentionSpec) -> tuple[Kernel, str]:
    """Return the decode kernel that serves a spec best, and why."""
    if spec.group_size == 1 and spec.sliding_window is None:
        return Kernel.CUDA_CORES, "query heads share no keys for tensor cores to multiply"
    if spec.group_size == 1:
        return Kernel.TENSOR_CORES, "the CUDA-core kernel reads all tokens, not only the window"
    return Kernel.TENSOR_CORES, "query heads share keys"


class TensorCoreBuilder(FlashInferBuilder):
    """Decodes with the FA2 kernel for every spec."""

    decode_kernel = Kernel.TENSOR_CORES


class CudaCoreBuilder(FlashInferBuilder):
    """Decodes on CUDA cores for every spec."""

    decode_kernel = Kernel.CUDA_CORES


class XqaBuilder(FlashInferBuilder):
    """Decodes with XQA, which needs no plan."""

    decode_kernel = Kernel.XQA
