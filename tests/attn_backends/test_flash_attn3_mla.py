"""The backend flash_attn3_mla by the conformance kit, over a stand-in for its kernels."""

import pytest

from attn_backends import Rejected
from spec_decode.conformance import check_backend
from spec_decode.testing.outcome import Outcome
from spec_decode.tools.specs import MLA
from tests.factories import CPU
from tests.flash_attn3_stand_in import installed


@pytest.fixture(scope="module")
def backend():
    with installed("flash_attn3_mla") as made:
        yield made


@pytest.mark.parametrize("family", ["contract", "builder", "poison", "graph", "refusal"])
def test_it_passes_the_kit(backend, family):
    check_backend(backend, device=CPU, families=[family])


def test_attention_is_right(backend):
    report = check_backend(backend, device=CPU, checks=["numerics.*"])
    served = {result.case.partition("-")[0] for result in report.results if result.outcome is Outcome.PASS}
    assert {"base", "bf16", "page_1", "heads_128", "length_4099"} <= served
    # On an H200 pages of 64 let NaN after the last token through.
    assert served.isdisjoint({"page_64", "deepseek_v3"})


def test_a_build_without_kernels_for_latents_refuses_with_the_reason(backend, monkeypatch):
    provider = type(backend).__mro__[1].forward.__globals__["PROVIDER"]
    monkeypatch.setattr(provider, "latent_query", None)
    verdict = backend.supports(MLA, CPU)
    assert isinstance(verdict, Rejected)
    assert any("built without the kernels for values wider than keys" in reason for reason in verdict.reasons)
