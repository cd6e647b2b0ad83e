"""vLLM's own metadata builders as subjects of the conformance kit: on a CPU, with no engine, model or GPU."""

from __future__ import annotations

from collections.abc import Sequence

from engine_kits.subjects import Listed, installed_version, state_builder, subject_of
from engine_kits.vllm import stand_in
from spec_decode.testing.subject import Subject

FAMILIES = ("builder", "graph")
"""The families that need no kernels."""
_SCORES = "an indexer scores by its metadata, it does not attend"
_CHOSEN = "an indexer chooses what is attended"
_BUILDERS = {
    "FlashAttentionMetadataBuilder": Listed("flash_attention"),
    "FlashInferMetadataBuilder": Listed("flashinfer", "FlashInfer's kernels attend by a plan that only they make"),
    "TritonAttentionMetadataBuilder": Listed("triton_attention"),
    "TritonMLAMetadataBuilder": Listed("triton_mla"),
    "DeepseekSparseSWAMetadataBuilder": Listed("sparse_swa"),
    "DeepseekV32IndexerMetadataBuilder": Listed("indexer", _SCORES),
    "DeepseekV32IndexerWithAnEmptyUpdate": Listed("indexer_with_an_empty_update", _SCORES),
    "FlashMLASparseMetadataBuilder": Listed("flashmla_sparse", _CHOSEN),
    "FlashMLASparseWithAnEmptyUpdate": Listed("flashmla_sparse_with_an_empty_update", _CHOSEN),
    "KpoolTailMetadataBuilder": Listed(
        "kpool_tail", "the tail of a pool is stored by its metadata, nothing attends to it"
    ),
    "GDNAttentionMetadataBuilder": state_builder("gated_delta.gdn"),
    "Mamba2AttentionMetadataBuilder": state_builder("mamba.mamba2"),
    "ShortConvAttentionMetadataBuilder": state_builder("mamba.short_conv"),
    "KimiK3KDAMetadataBuilder": state_builder("gated_delta.kda"),
}
NAMES = tuple(_BUILDERS)


def require_engine() -> str:
    """Return vLLM's version. Raises BrokenBackend if it is not installed or not 0.33."""
    return installed_version("vllm", "0.33.*", "vLLM's builders")


def subjects(names: Sequence[str] = NAMES) -> list[Subject]:
    """Return these builders of the installed vLLM. Raises BrokenBackend for unknown ones, or a vLLM other than 0.33."""
    version = require_engine()
    stand_in.enter()
    return [subject_of(name, __name__, _BUILDERS, f"vllm {version}", FAMILIES) for name in names]
