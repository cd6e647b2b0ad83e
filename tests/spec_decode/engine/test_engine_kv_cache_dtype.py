"""8-bit KV caches of target and draft: their bytes, their scales, and texts that do not depend on the drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends import NoBackend
from spec_decode.trees import DynamicTreeConfig
from tests.factories import make_request
from tests.spec_decode.engine.engine_helpers import PAIR, make_engine, pair, texts

FP8, FP32 = torch.float8_e4m3fn, torch.float32
REQUESTS = [make_request(prompt=[3, 1, 4, 1, 5], max_tokens=12), make_request(prompt=[9, 2, 6], max_tokens=9)]


def dtypes(engine: Any) -> list[torch.dtype]:
    """Return the dtypes of the target's and of the draft's cache."""
    groups = (engine.target.groups[0], engine.drafter.groups[0])
    return [next(iter(group.caches.values())).key.dtype for group in groups]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, [FP32, FP32]),
        ({"kv_cache_dtype": "fp8"}, [FP8, FP8]),
        ({"kv_cache_dtype": "fp8_e4m3", "draft_kv_cache_dtype": "auto"}, [FP8, FP32]),
        ({"draft_kv_cache_dtype": "fp8"}, [FP32, FP8]),
    ],
)
def test_each_model_has_the_cache_that_it_was_given(options: dict[str, Any], found: list[torch.dtype]) -> None:
    assert dtypes(make_engine(**options)) == found


@pytest.mark.parametrize("options", [{}, {"tree": DynamicTreeConfig(width=2, num_tokens=6)}], ids=["chain", "tree"])
@pytest.mark.parametrize("backend", ["torch_reference", "triton_paged"])
def test_texts_over_8_bits_do_not_depend_on_the_drafts(backend: str, options: dict[str, Any]) -> None:
    name = "draft" if backend == "triton_paged" else None
    models = PAIR if name is None else pair(name)
    run = {"pair": models, "backend": backend, "kv_cache_dtype": "fp8"}
    plain = texts(make_engine(**run, steps=0), REQUESTS)
    assert texts(make_engine(**run, **options), REQUESTS) == plain


def test_caches_have_the_scales_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = PAIR
    monkeypatch.setattr(target, "kv_scales", {0: (0.25, 3.0)})
    engine = make_engine(kv_cache_dtype="fp8")
    scales = [next(iter(each.groups[0].caches.values())).scales for each in (engine.target, engine.drafter)]
    assert [(each.key_floats, each.value_floats) for each in scales] == [((0.25,), (3.0,)), ((1.0,), (1.0,))]
    assert next(iter(make_engine().target.groups[0].caches.values())).scales is None


def test_a_backend_without_8_bits_is_refused_by_name() -> None:
    from tests.flashinfer_stand_in import backend, installed

    with installed(), pytest.raises(NoBackend, match=r"flashinfer_xqa rejects it: .*kv_dtype must be"):
        make_engine(backend=backend("flashinfer_xqa"), kv_cache_dtype="fp8")
