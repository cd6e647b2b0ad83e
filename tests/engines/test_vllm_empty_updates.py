"""Controls for FlashMLA's sparse latents, with an empty update and with ours: the kit catches a broken copy.

Needs vLLM's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for vLLM's own Triton kernels.
"""

from __future__ import annotations

import dataclasses
from copy import copy

import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.testing.outcome import CheckFailure
from spec_decode.testing.subject import Subject
from tests.engines import vllm_sparse
from tests.engines.released import needs

pytestmark = needs("vllm", "0.33")
CHECKS = (
    "builder.advance_means_a_rebuild[base-decode]",
    "builder.advance_refreshes_another_batch[base-decode]",
    "graph.replayed_advances_mean_a_rebuild[base-decode]",
)


def run(backend, name):
    from spec_decode.conformance.check import expand

    subject = Subject(backend(), torch.device("cpu"), engine="vllm", no_attention="none")
    (found,) = (check for check in expand(subject) if check.id == name)
    with torch_implementations():
        return found()


@pytest.mark.parametrize("name", CHECKS)
def test_empty_update_passes_only_without_copies(vllm_inside, name):
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadataBuilder

    from engine_kits.vllm.flashmla_sparse import backend_over
    from engine_kits.vllm.making import with_empty_update

    class Copies(FlashMLASparseMetadataBuilder):
        """A builder with lengths of its own, as the indexer has them."""

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            return dataclasses.replace(metadata, seq_lens=metadata.seq_lens.clone())

    run(backend_over(with_empty_update(FlashMLASparseMetadataBuilder, "Views"), __name__), name)
    with pytest.raises(CheckFailure, match="field seq_lens"):
        run(backend_over(with_empty_update(Copies, "Copies"), __name__), name)


@pytest.mark.parametrize(
    ("dtype", "separate", "name"), [(*cache, name) for cache, name in zip(vllm_sparse.CACHES, CHECKS, strict=True)]
)
def test_our_update_leaves_nothing_stale(vllm_inside, dtype, separate, name, monkeypatch):
    from attn_backends.engines.vllm.sparse import InGraphSparseBuilder
    from engine_kits.vllm.flashmla_sparse import backend_over

    vllm_sparse.install(monkeypatch, separate=separate)

    class Ours(InGraphSparseBuilder):
        def __init__(self, group, names, config, device):
            config = copy(config)
            config.cache_config = copy(config.cache_config)
            config.cache_config.cache_dtype = dtype
            super().__init__(group, names, config, device)

    class Copies(Ours):
        def build(self, *args, **more):
            metadata = super().build(*args, **more)
            return dataclasses.replace(metadata, seq_lens=metadata.seq_lens.clone())

    run(backend_over(Ours, __name__), name)
    with pytest.raises(CheckFailure, match="field seq_lens"):
        run(backend_over(Copies, __name__), name)
