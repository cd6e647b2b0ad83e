"""vLLM's own metadata builders as subjects of the conformance kit: on a CPU, with no engine, model or GPU."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from attn_backends import BrokenBackend
from engines.vllm.conformance import stand_in
from spec_decode.testing.subject import Subject

FAMILIES = ("builder", "graph")
"""What a builder can be asked without its kernels."""
_SUBJECTS = {
    "FlashAttentionMetadataBuilder": ("flash_attention", ""),
    "FlashInferMetadataBuilder": ("flashinfer", "FlashInfer's kernels attend by a plan that only they make"),
    "TritonAttentionMetadataBuilder": ("triton_attention", ""),
    "TritonMLAMetadataBuilder": ("triton_mla", ""),
    "DeepseekSparseSWAMetadataBuilder": ("sparse_swa", ""),
    "DeepseekV32IndexerMetadataBuilder": ("indexer", "an indexer scores by its metadata, it does not attend"),
    "KpoolTailMetadataBuilder": ("kpool_tail", "the tail of a pool is stored by its metadata, nothing attends to it"),
}
"""Each builder with its module here, and why nothing attends by what it builds."""
NAMES = tuple(_SUBJECTS)


def require_engine() -> None:
    """Raise BrokenBackend where vLLM is not installed, or another than 0.33."""
    stand_in.vllm_version()


def subjects(names: Sequence[str] = NAMES) -> list[Subject]:
    """These builders of the installed vLLM. Raises BrokenBackend for an unknown one, and for another vLLM than 0.33."""
    version = stand_in.vllm_version()
    stand_in.enter()
    return [_subject(name, version) for name in names]


def _subject(name: str, version: str) -> Subject:
    if name not in NAMES:
        raise BrokenBackend(
            f"a builder of vLLM that is checked must be one of {', '.join(NAMES)}, got {name!r}. Fix the name."
        )
    module, no_attention = _SUBJECTS[name]
    backend = import_module(f"{__name__}.{module}").backend()
    backend.version = version
    return Subject(backend(), torch.device("cpu"), engine=f"vllm {version}", no_attention=no_attention)
