"""FlashMLA over window lists: loading its module, the lists, and the schedule of a batch shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from builders.batch import AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport
from builders.sparse_window import SparseWindowBuilder, SparseWindowMetadata
from builders.spec import AttentionSpec

_TOKEN_BYTES = 584
"""Bytes per token in the fp8_ds_mla format; see attn_backends.kernels.fp8_ds_mla."""


_MODULES = ("flash_mla.flash_mla_interface", "vllm.third_party.flashmla.flash_mla_interface")
SPARSE = {"flash_mla_sparse_fwd": {"attn_sink"}, "flash_mla_with_kvcache": {"indices", "attn_sink"}}
"""Entry points called with lists of slots, each with the arguments that older releases lack."""
DENSE = {"FlashMLASchedMeta": {"have_initialized"}, "flash_mla_with_kvcache": {"block_table", "cache_seqlens"}}
"""The same for whole prefixes. Older releases schedule in a separate call, which takes lengths."""


def load_flashmla(entries: Mapping[str, set[str]] = SPARSE) -> Any:
    """Import FlashMLA's module: the standalone package if it is installed, else the copy in vLLM's wheel.

    Raises ImportError if neither is installed, and RuntimeError if the one found does not load or lacks one of the
    entries or an argument of it; the other is then not tried.
    """
    for name in _MODULES:
        package = name.partition(".")[0]
        try:
            import_module(package)
            module = import_module(name)
        except Exception as error:  # a broken build can raise anything; its message becomes the reason
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                continue
            raise RuntimeError(f"{name} is installed but cannot be used: {type(error).__name__}: {error}") from error
        for entry, needed in entries.items():
            found = set(signature(getattr(module, entry)).parameters) if hasattr(module, entry) else set()
            if missing := sorted(needed - found):
                raise RuntimeError(f"{name} is too old: its {entry} must accept {' and '.join(missing)}")
        return module
    raise ImportError("FlashMLA is not installed, as flash_mla or in vllm")


@dataclass(frozen=True, slots=True)
class FlashMlaSchedule:
    """How FlashMLA spreads the tokens of a batch over the device. Made by its first call, from shapes only."""

    num_tokens: int
    made: Any = field(compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashMlaMetadata(SparseWindowMetadata):
    """Window lists padded with -1, and a schedule for lists of full width, which does not depend on lengths."""

    schedule: FlashMlaSchedule


class FlashMlaSparseBuilder(SparseWindowBuilder):
    """Lists windows, but does not pass their lengths to the kernel, so that one schedule holds for every step.

    A schedule made for lengths would be wrong as soon as one of them crosses a multiple of 64.
    """

    def allocate(self) -> None:
        super().allocate()
        self._schedules: dict[int, FlashMlaSchedule] = {}

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "window lists are recomputed by one kernel; the schedule stays")

    def metadata_of(self, batch: AttentionBatch) -> FlashMlaMetadata:
        if batch.num_tokens not in self._schedules:
            made = self._make_schedule(batch.num_tokens)
            self._schedules[batch.num_tokens] = FlashMlaSchedule(batch.num_tokens, made)
        return FlashMlaMetadata(**self.batch_fields(batch), schedule=self._schedules[batch.num_tokens])

    def _make_schedule(self, num_tokens: int) -> Any:
        """Have the kernel make the schedule now, on empty lists: one made during capture would belong to the graph."""
        flashmla = load_flashmla()
        schedule, _ = flashmla.get_mla_metadata()
        if not self.spec.fp8_ds_mla:
            return schedule
        spec, device = self.spec, self.device
        query = torch.zeros(num_tokens, 1, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
        page = torch.zeros(1, spec.page_size, 1, _TOKEN_BYTES, dtype=torch.uint8, device=device)
        indices = torch.full((num_tokens, 1, self.width), -1, dtype=torch.int32, device=device)
        flashmla.flash_mla_with_kvcache(
            q=query,
            k_cache=page,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=spec.head_dim,
            tile_scheduler_metadata=schedule,
            is_fp8_kvcache=True,
            indices=indices,
        )
        return schedule
