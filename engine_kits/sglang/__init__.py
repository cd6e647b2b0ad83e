"""SGLang's own draft backends as subjects of the conformance kit: on a CPU, with no engine, model or GPU."""

from __future__ import annotations

from collections.abc import Sequence

from attn_backends.engines.sglang.version import SUPPORTED
from engine_kits.sglang import (
    round_checks,  # noqa: F401  adds to the family
    stand_in,
)
from engine_kits.subjects import Listed, installed_version, state_builder, subject_of
from spec_decode.testing.subject import Subject

FAMILIES = ("graph",)
"""Plans exist for graphs only."""
_BACKENDS = {
    "DeepseekSparseAttnMultiStepBackend": Listed(
        "dsa", "an indexer, whose kernels need a GPU, chooses what is attended"
    ),
    "DeepseekV4MultiStepBackend": Listed("dsv4", "FlashMLA reads a cache of packed bytes, which needs a GPU"),
    "FlashAttentionMultiStepBackend": Listed("flash_attention"),
    "FlashInferMLAMultiStepDraftBackend": Listed("flashinfer_mla"),
    "FlashInferMultiStepDraftBackend": Listed("flashinfer"),
    "FlashMLAMultiStepDraftBackend": Listed("flashmla"),
    "TRTLLMMLAMultiStepDraftBackend": Listed("trtllm_mla"),
    "TritonMultiStepDraftBackend": Listed("triton"),
    "GDNAttnBackend": state_builder("gdn"),
    "Mamba2AttnBackend": state_builder("mamba2"),
}
NAMES = tuple(_BACKENDS)


def require_engine() -> str:
    """Return SGLang's version. Raises BrokenBackend if it is not installed or not 0.5.23."""
    return installed_version("sglang", SUPPORTED, "SGLang's draft backends")


def subjects(names: Sequence[str] = NAMES) -> list[Subject]:
    """Return these draft backends of the installed SGLang. Raises BrokenBackend for unknown ones, or another SGLang."""
    version = require_engine()
    stand_in.enter()
    return [subject_of(name, __name__, _BACKENDS, f"sglang {version}", FAMILIES) for name in names]
