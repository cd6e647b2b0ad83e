"""The shipped drafts on real held-out text: greedy decoding generates the same text with and without them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from attn_backends import get
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine, Generation, Request
from spec_decode.llm.byte_tokenizer import encode
from spec_decode.model_api import AttentionInputs
from spec_decode.models import SHIPPED_PAIR, EagleDraft, LlamaTarget, load_pair
from spec_decode.paged import GraphMode
from spec_decode.testing.held_out_text import held_out_prompts
from tests.factories import engine_config, make_request

PROMPTS, NEW_TOKENS = 6, 24
FEW: dict[str, int] = {"prompts": 2, "max_tokens": 18}
"""Where every strategy of every backend writes them: into a page that no prompt has begun."""
CLOSE = 1e-4
"""Two candidates whose logits lie nearer than this may swap by rounding alone."""


@cache
def pair(draft: str = "draft") -> tuple[LlamaTarget, EagleDraft]:
    return load_pair(SHIPPED_PAIR, draft=draft)


def requests(prompts: int = PROMPTS, max_tokens: int = NEW_TOKENS, **changes: Any) -> list[Request]:
    texts = held_out_prompts(prompts, 96)
    return [make_request(prompt=encode(text), max_tokens=max_tokens, **changes) for text in texts]


def run(
    backend: str, steps: int, strategy: Strategy | None, draft: str, batch: list[Request]
) -> tuple[Engine, list[Generation]]:
    """backend: the draft's, and the target's too unless the draft is another than the pair's own."""
    config = engine_config(
        num_speculative_tokens=steps,
        max_num_seqs=min(6, len(batch)),
        max_model_len=160,
        graph_mode=GraphMode.NONE if strategy is Strategy.EAGER else GraphMode.FULL,
        strategy=strategy,
    )
    target_backend = get(backend if draft == "draft" else "triton_paged")
    engine = Engine(*pair(draft), target_backend, config, draft_backend=get(backend))
    return engine, engine.generate(batch)


@cache
def plain() -> list[list[int]]:
    return [generation.token_ids for generation in run("triton_paged", 0, None, "draft", requests(**FEW))[1]]


@cache
def greedy_and_sampled(draft: str, backend: str, strategy: Strategy) -> tuple[list[list[int]], list[list[int]]]:
    batch = [*requests(**FEW), *requests(**FEW, temperature=1.0, seed=11)]
    found = [generation.token_ids for generation in run(backend, 4, strategy, draft, batch)[1]]
    return found[:2], found[2:]


def logits_behind(prefix: Sequence[int]) -> torch.Tensor:
    """The target's logits behind a prefix, by dense attention: no cache, no backend."""

    def attend(inputs: AttentionInputs) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in inputs.normed_and_rotated())
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    target = pair()[0]
    hidden = target(torch.tensor(list(prefix)), torch.arange(len(prefix)), attend).hidden
    return target.logits(hidden[-1:])[0]


def excused(prompt: Sequence[int], wanted: list[int], found: list[int]) -> bool:
    """Whether the first difference lies between two candidates that rounding may swap."""
    at = next(i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b)
    logits = logits_behind([*prompt, *wanted[:at]])
    return bool((logits[wanted[at]] - logits[found[at]]).abs() <= CLOSE)


# No backend here is one that a graph cannot hold, which is what the piecewise strategy is for.
STRATEGIES = [strategy for strategy in Strategy if strategy is not Strategy.PIECEWISE]


def strategies_of(draft: str) -> list[Strategy]:
    """A draft that proposes its tokens at once has no later steps to loop over."""
    return [strategy for strategy in STRATEGIES if draft != "block_draft" or strategy is not Strategy.DEVICE_LOOP]


SERVED = [
    ("draft", "torch_reference"),
    ("draft", "triton_paged"),
    ("latent_draft", "sparse_swa_mla"),
    ("block_draft", "triton_paged"),
]


@pytest.mark.parametrize(
    ("draft", "backend", "strategy"),
    [
        pytest.param(
            *served,
            strategy,
            id="-".join((*served, strategy.value)),
            marks=[pytest.mark.slow] * (served == SERVED[0] or strategy is not Strategy.FULL_LOOP),
        )
        for served in SERVED
        for strategy in strategies_of(served[0])
    ],
)
def test_shipped_draft_texts_match_in_every_strategy(draft: str, backend: str, strategy: Strategy) -> None:
    """Greedy text is also that of plain decoding."""
    greedy, sampled = greedy_and_sampled(draft, backend, strategy)
    for request, found, wanted in zip(requests(**FEW), greedy, plain(), strict=True):
        assert found == wanted or excused(request.prompt, wanted, found)
    assert sampled == greedy_and_sampled(draft, backend, Strategy.EAGER)[1]


def test_plain_text_is_argmax_of_target() -> None:
    prompt, text = requests(**FEW)[0].prompt, plain()[0]

    assert [int(logits_behind([*prompt, *text[:n]]).argmax()) for n in range(12)] == text[:12]


@pytest.mark.parametrize(
    ("draft", "backend", "least"),
    [("draft", "triton_paged", 2.0), ("latent_draft", "sparse_swa_mla", 1.8), ("block_draft", "triton_paged", 1.8)],
)
def test_draft_is_accepted_above_chance_on_unseen_text(draft: str, backend: str, least: float) -> None:
    engine, _ = run(backend, 4, Strategy.EAGER, draft, requests())

    assert engine.stats.mean_accepted >= least
