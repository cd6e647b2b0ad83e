"""A pair run without a paged cache generates what the engine generates with one."""

import pytest
import torch
from train_pair.attention import run_target
from train_pair.drafts import make_draft
from train_pair.generation import speculate, write
from train_pair.losses import draft_loss
from train_pair.recipe import Recipe

from attn_backends import get
from spec_decode.engine import Engine
from spec_decode.llm.byte_tokenizer import decode, encode
from spec_decode.paged import GraphMode
from tests.factories import (
    CPU,
    engine_config,
    make_block_config,
    make_config,
    make_latent_config,
    make_pair,
    make_request,
)

PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
WINDOWS = pytest.mark.parametrize("window", [None, 4])


def greedy(pair, prompt, count):
    config = engine_config(num_speculative_tokens=0, max_model_len=64, graph_mode=GraphMode.NONE)
    engine = Engine(*pair, get("torch_reference"), config)
    return engine.generate([make_request(prompt=prompt, max_tokens=count)])[0].token_ids


@WINDOWS
def test_dense_target_matches_engine_greedy(window):
    pair, tokens = make_pair(make_config(sliding_window=window), context=1.0), PROMPTS
    for _ in range(12):
        following = pair[0].logits(run_target(pair[0], tokens))[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], 1)
    assert tokens[:, 5:].tolist() == [greedy(pair, prompt, 12) for prompt in PROMPTS.tolist()]


@WINDOWS
def test_cool_target_samples_its_greedy_tokens(window, monkeypatch):
    pair = make_pair(make_config(sliding_window=window), context=1.0)
    monkeypatch.setattr(torch, "rand", torch.zeros)
    written = write(pair[0], PROMPTS, 17, torch.float32)
    assert written[:, 5:].tolist() == [greedy(pair, prompt, 12) for prompt in PROMPTS.tolist()]


@pytest.mark.parametrize("make", [make_config, make_latent_config])
def test_draft_is_trained_with_its_own_window(make):
    tokens = torch.randint(0, 24, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for window in (None, 16, 3):
        target, draft = make_pair(make_config(), make(sliding_window=window), context=1.0)
        losses.append(draft_loss(draft, target, tokens, Recipe()).item())
    assert losses[0] == pytest.approx(losses[1]) and losses[2] != pytest.approx(losses[0], rel=1e-4)


def make_terse_pair(kind):
    """A target that writes four letters alone, so that a draft of random numbers agrees now and then."""
    target, draft = make_pair(make_config(vocab_size=256, max_positions=256), context=1.0)
    target.lm_head.weight[: ord("a")] = 0
    target.lm_head.weight[ord("e") :] = 0
    if kind == "block":
        torch.manual_seed(0)
        draft = make_draft(make_block_config(target.config), target, CPU).eval().requires_grad_(False)
        for parameter in draft.parameters():
            parameter.mul_(12 if parameter.dim() > 1 else 1)
    return target, draft


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_dense_pair_accepts_what_engine_accepts(kind):
    pair, prompts, rounds, drafted = make_terse_pair(kind), ["The for", "def rea"], 6, 3
    config = engine_config(num_speculative_tokens=drafted, max_model_len=64, graph_mode=GraphMode.NONE)
    engine = Engine(*pair, get("torch_reference"), config)
    generations = engine.generate([make_request(prompt=encode(prompt), max_tokens=28) for prompt in prompts])
    accepted = [generation.accepted[:rounds] for generation in generations]
    texts = [
        decode(encode(prompt) + generation.token_ids[: 1 + sum(kept) + rounds])
        for prompt, generation, kept in zip(prompts, generations, accepted, strict=True)
    ]
    assert speculate(*pair, prompts, rounds, drafted) == (sum(map(sum, accepted)) / (2 * rounds), texts)
    assert len({kept for row in accepted for kept in row}) > 2
