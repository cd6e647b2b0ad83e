"""The shipped drafts with 8-bit weights on held-out text: the same texts, and as many accepted tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from attn_backends import get
from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from builders import BatchError
from spec_decode import LLM, SamplingParams
from spec_decode.engine import Engine, Request
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.models import SHIPPED_PAIR, load_pair, quantise_draft
from spec_decode.paged import GraphMode
from spec_decode.testing.held_out_text import held_out_prompts
from tests.factories import engine_config

PROMPTS = held_out_prompts(4, 48)
GREEDY, FEW = SamplingParams(max_tokens=24), SamplingParams(max_tokens=12)
DRAFTS = {"draft": "triton_paged", "latent_draft": "sparse_swa_mla", "block_draft": "triton_paged"}
"""And what serves each."""
NEAR = 0.3
"""By how many of four tokens a round the acceptance may differ on so little text. Measured on 12 prompts and 64 tokens:
0.05 at most."""


def make(draft: str | None, **settings: Any) -> LLM:
    return LLM("pydoc", draft=draft, device="cpu", dtype="bfloat16", max_num_seqs=2, max_model_len=96, **settings)


def accepted(draft: str, draft_weights: str | None) -> float:
    """Draft tokens of four a round, without graphs: what is captured is drafted alike."""
    target, model = load_pair(SHIPPED_PAIR, draft=draft, dtype=torch.bfloat16)
    if draft_weights:
        quantise_draft(model, draft_weights)
    config = engine_config(num_speculative_tokens=4, max_num_seqs=4, max_model_len=96, graph_mode=GraphMode.NONE)
    engine = Engine(target, model, get("triton_paged"), config, draft_backend=get(DRAFTS[draft]))
    engine.generate([Request(prompt=encode(prompt), sampling=GREEDY) for prompt in PROMPTS])
    return engine.stats.mean_accepted


bf16 = cache(accepted)


@cache
def own_texts() -> list[str]:
    """The target's, without a draft."""
    plain = make(None, batch_invariant=True)
    return [one.text for one in plain.generate(PROMPTS[:2], FEW)]


@pytest.mark.parametrize("draft", DRAFTS)
def test_fp8_draft_changes_no_greedy_text(draft: str) -> None:
    # Where no sum depends on the batch, texts in bf16 are equal whatever is drafted.
    found = make(draft, draft_weights="fp8", batch_invariant=True).generate(PROMPTS[:2], FEW)
    assert [one.text for one in found] == own_texts() and sum(found[0].accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_fp8_draft_accepts_about_as_many_tokens(draft: str) -> None:
    assert accepted(draft, "fp8") == pytest.approx(bf16(draft, None), abs=NEAR)


WRONG = {
    "forgotten": torch.ones_like,
    "one for the whole weight": lambda scale: scale.mean().expand_as(scale).contiguous(),
    "the next output's": lambda scale: scale.roll(1, -1),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_wrong_fp8_scales_accept_fewer_tokens(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Fp8Weight.of

    def wrong(weight: torch.Tensor) -> Fp8Weight:
        quantised = right(weight)
        return Fp8Weight(quantised.values, change(quantised.scale))

    monkeypatch.setattr(Fp8Weight, "of", wrong)
    assert accepted("draft", "fp8") < bf16("draft", None) - 1.5 * NEAR


def test_only_the_draft_has_fp8_weights() -> None:
    llm = make("draft", draft_weights="fp8")
    target, _ = load_pair(SHIPPED_PAIR, dtype=torch.bfloat16)
    assert llm.pair.draft is not None
    assert any(isinstance(part, Fp8Weight) for part in llm.pair.draft.modules())
    for name, weight in llm.pair.target.named_parameters():
        assert torch.equal(weight, target.get_parameter(name))
    assert "draft's matrix products read fp8 weights" in llm.explain()
    assert "fp8" not in make("draft").explain()


REFUSED = {
    "no draft": ({"draft": None}, r"draft_weights is 'fp8' and there is no draft\. Pass draft="),
    "a draft that drafts nothing": ({"num_speculative_tokens": 0}, "Pass draft= and speculative tokens, or"),
    "float32": (
        {"dtype": "auto"},
        r"needs models in bfloat16 or float16, got float32\. Load them with dtype bfloat16",
    ),
    "another name": ({"draft_weights": "int8"}, r"draft_weights is 'int8'\..* Pass one of fp8, or leave it out"),
    "a number": ({"draft_weights": 8}, r"draft_weights is 8\. Pass one of fp8, or leave it out"),
}


@pytest.mark.parametrize(("change", "why"), REFUSED.values(), ids=REFUSED)
def test_invalid_fp8_options_are_rejected_before_loading(
    change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_decode.llm.llm.load", None)
    settings: dict[str, Any] = {"draft": "draft", "dtype": "bfloat16", "draft_weights": "fp8", **change}
    with pytest.raises(BatchError, match=why):
        LLM("pydoc", device="cpu", **settings)
