"""The conformance kit over flash_attn3 and flash_attn3_mla, with a stand-in for their kernels."""

from dataclasses import replace

import pytest
import torch

from attn_backends import Rejected
from spec_decode.conformance import check_backend
from spec_decode.testing.batches import VERIFY
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject
from spec_decode.tools.specs import MLA
from tests.factories import CPU, make_spec
from tests.flash_attn3_stand_in import installed
from tests.telling_checks import KIT, telling_checks

VARIANTS = {
    "base",
    "window",
    "soft_cap",
    "sinks",
    "page_1",
    "page_64",
    "fp16",
    "dim_256",
    "dims_64_and_256",
    "fp8_cache",
}
TREES = "numerics.trees_see_their_ancestors"


@pytest.fixture(scope="module")
def backend():
    with installed() as installed_backend:
        yield installed_backend


@pytest.fixture(scope="module")
def mla():
    with installed("flash_attn3_mla") as installed_backend:
        yield installed_backend


@pytest.mark.slow
@pytest.mark.parametrize("name", ["backend", "mla"])
def test_flash_attn3_passes_the_kit(name, request):
    instance = request.getfixturevalue(name)
    check_backend(instance, device=CPU, checks=telling_checks(instance, *KIT))


def served(results):
    return {result.case.partition("-")[0] for result in results if result.outcome is Outcome.PASS}


def test_strategies_agree_on_whole_rounds(backend):
    check_backend(backend, device=CPU, checks=["drafter.strategies_agree[[]k3-n3[]]"])


def test_attention_and_trees_pass_except_windows(backend):
    patterns = [*(f"numerics.*[[]{variant}-*" for variant in VARIANTS), f"{TREES}[[]*-ragged[]]"]
    report = check_backend(backend, device=CPU, checks=telling_checks(backend, *patterns))
    trees = {result.case: result.outcome for result in report.results if result.check == TREES}
    refused = {case for case, outcome in trees.items() if outcome is not Outcome.PASS}
    assert {"base-ragged", "sinks-ragged", "soft_cap-ragged", "dim_128-ragged"} <= trees.keys() - refused
    assert {case.partition("-")[0] for case in refused} == {"window"}
    assert served(result for result in report.results if result.check != TREES) == VARIANTS


@pytest.mark.slow
def test_latent_attention_passes_numerics_checks(mla):
    found = served(check_backend(mla, device=CPU, checks=telling_checks(mla, "numerics.*")).results)
    assert {"base", "bf16", "page_1", "heads_128", "length_4099"} <= found
    # On an H200 pages of 64 let NaN after the last token through.
    assert found.isdisjoint({"page_64", "deepseek_v3"})


def test_build_without_latent_kernels_is_rejected(mla, monkeypatch):
    provider = type(mla).__mro__[1].forward.__globals__["PROVIDER"]
    monkeypatch.setattr(provider, "latent_query", None)
    verdict = mla.supports(MLA, CPU)
    assert isinstance(verdict, Rejected)
    assert any("lacks the kernels for values wider than keys" in reason for reason in verdict.reasons)


def test_tree_spec_also_serves_chains(backend):
    subject = Subject(backend, CPU)
    fixture = PagedFixture(subject, replace(subject.base_spec(), tree=True), VERIFY.rows)
    BuiltBatch(fixture, VERIFY).expect_attention("attention of chains")


def test_trees_with_window_are_rejected(backend):
    spec = make_spec(dtype=torch.bfloat16, head_dim=64, page_size=16, tree=True, sliding_window=64)
    verdict = backend.supports(spec, CPU)
    assert isinstance(verdict, Rejected)
    assert verdict.reasons == (
        "with trees sliding_window must be None: a window counts a token's depth in its tree, this kernel's its index, "
        "got 64",
    )


def test_sinks_are_served_only_in_bf16(backend):
    specs = {dtype: make_spec(sinks=True, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    assert backend.supports(specs[torch.bfloat16], CPU)
    assert backend.supports(specs[torch.float16], CPU) == Rejected(
        ("with sinks dtype must be bfloat16, to which the kernels round them, got torch.float16",)
    )
