"""Recurrent state in Triton: steps and prompts of every recurrence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_backends.capabilities import Sizes
from attn_backends.state import StateBackend, StateInputs, check_state_inputs
from attn_backends.state_cache import StateCache, StateLengths
from attn_backends.state_capabilities import StateCapabilities, StateFeature
from attn_backends.state_kernels.move_entries import MoveEntries, move_entries
from attn_backends.state_kernels.rows import EndStateStep, end_state_step
from attn_backends.state_kernels.step import StateStep, state_step
from builders import Recurrence, StateMetadata, StateSpec
from builders.errors import require, require_tensor
from builders.kernels.triton_runtime import TRITON_VERSION, interpreting, triton_unsupported_reasons


class TritonState(StateBackend):
    """Triton kernels on CUDA; on a CPU only in Triton's interpreter, since `torch_state` is faster there."""

    name = "triton_state"
    version = TRITON_VERSION
    contract_version = (1, 3)
    capabilities = StateCapabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        recurrences=tuple(Recurrence),
        key_dims=Sizes(minimum=8, maximum=256, multiple_of=8),
        value_dims=Sizes(minimum=8, maximum=256, multiple_of=8),
        conv_widths=Sizes(maximum=8),
        journals=Sizes(maximum=64),
        features=frozenset({StateFeature.GROUPED_KEYS, StateFeature.TREE}),
    )

    def unsupported_reasons(self, spec: StateSpec, device: torch.device) -> list[str]:
        if device.type == "cpu" and not interpreting():
            return ["runs on a CPU only in Triton's interpreter: set TRITON_INTERPRET=1"]
        reasons = triton_unsupported_reasons(device.type)
        if spec.recurrence.rule.subtracts and spec.key_dim > 128:
            reasons.append(f"key_dim must be at most 128 for {spec.recurrence.value}, got {spec.key_dim}")
        return reasons

    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        """See `StateBackend.forward`. Raises BatchError also for a cache that is not contiguous."""
        check_state_inputs(inputs, cache, metadata, spec)
        names = ("state", "conv", "key", "update", "decay")
        strided = [name for name in names if not getattr(cache, name).is_contiguous()]
        require(
            not strided,
            f"{' and '.join(strided)} of the cache must be contiguous; nothing was written. Use allocate_state.",
        )
        return state_step(*StateStep.of(inputs, cache, metadata, spec.recurrence))

    def end_step(self, lengths: StateLengths, metadata: StateMetadata, *, spec: StateSpec) -> None:
        end_state_step(
            *EndStateStep(
                base=lengths.base,
                held=lengths.held,
                lost=lengths.lost,
                query_start_loc=metadata.query_start_loc,
                seq_lens=metadata.seq_lens,
                slots=metadata.slots,
                journal=spec.journal,
                max_seq_len=metadata.max_seq_len,
                absorb=metadata.absorb,
                may_fold=metadata.may_fold,
                reserve=metadata.reserve,
            )
        )

    def move_accepted(
        self, caches: Sequence[StateCache], metadata: StateMetadata, path: Tensor, *, spec: StateSpec
    ) -> None:
        """See `StateBackend.move_accepted`: one kernel per layer. Paths must ascend, as those of a verified tree do.

        Raises BatchError for a path of another shape, dtype or device.
        """
        device = caches[0].state.device
        require_tensor("path", path, shape=(metadata.num_reqs, None), dtype=torch.int64, device=device)
        for cache in caches:
            move_entries(
                *MoveEntries(
                    conv=cache.conv,
                    key=cache.key,
                    update=cache.update,
                    decays=cache.decay,
                    base=cache.lengths.base,
                    held=cache.lengths.held,
                    query_start_loc=metadata.query_start_loc,
                    seq_lens=metadata.seq_lens,
                    slots=metadata.slots,
                    path=path,
                )
            )
