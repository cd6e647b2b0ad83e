"""A block in training, next to others in whole sequences, equals the block that the drafter runs over pages."""

import pytest
import torch
from train_pair.attention import run_target
from train_pair.blocks import Blocks, draw_blocks, run_blocks
from train_pair.drafts import make_draft
from train_pair.losses import block_loss
from train_pair.recipe import Recipe

from attn_backends import get
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, VerifiedTokens
from spec_decode.paged.kv_groups import make_group
from tests import factories
from tests.factories import CPU, make_block_config, make_pair

STARTS, MASKS = torch.tensor([[2, 9, 10, 26], [4, 5, 17, 33]]), 5
PAGE, MAX_LEN = 4, 48
CLOSE = 1e-4


def make_models():
    """A target that goes by its context, and a block draft whose every part matters."""
    target = make_pair(context=1.0)[0]
    torch.manual_seed(3)
    draft = make_draft(make_block_config(target.config), target, CPU).eval().requires_grad_(False)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.mul_(12)
        else:
            parameter.add_(torch.randn_like(parameter) / 3)
    return target, draft


def make_text(target):
    tokens = torch.randint(0, target.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    return tokens, run_target(target, tokens)


def full(starts, steps, padded_to=MASKS):
    return Blocks(starts, torch.full_like(starts, steps), padded_to)


def make_tables(reqs):
    return factories.make_tables([MAX_LEN] * reqs, page_sizes=[PAGE], max_seq_len=MAX_LEN)


def make_drafter(draft, reqs, steps):
    """Over caches in which a slot that is read before it was written shows."""
    (layers,) = draft.layer_groups(PAGE)
    pages = reqs * MAX_LEN // PAGE
    group = make_group("draft", get("torch_reference"), layers.spec, layers.layers, num_pages=pages, device=CPU)
    for cache in group.caches.values():
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
    config = DrafterConfig(num_speculative_tokens=steps, strategy=Strategy.EAGER)
    return Drafter(draft, [group], make_tables(reqs), config)


def over_pages(draft, texts, starts, steps):
    """States and logits of the masks after each start of its text: tokens [L] and the target's states [L, H]."""
    reqs, drafter = len(starts), make_drafter(draft, len(starts), steps)
    accepted = [min(start - 2, index % (steps + 1)) for index, start in enumerate(starts)]
    contexts = [start - 1 - kept for start, kept in zip(starts, accepted, strict=True)]
    token_ids, hidden = (
        torch.cat([text[i][:count] for text, count in zip(texts, contexts, strict=True)]) for i in range(2)
    )
    drafter.prefill(make_tables(reqs), contexts, contexts, token_ids, hidden)
    # States of tokens that were rejected are anything.
    verified = torch.full((reqs, steps + 1, hidden.shape[1]), 1e3)
    for row, (context, start) in enumerate(zip(contexts, starts, strict=True)):
        verified[row, : start - context] = texts[row][1][context:start]
    seen = []
    hook = draft.norm.register_forward_hook(lambda *call: seen.append(call[-1][1]))
    drafts = drafter.propose(
        VerifiedTokens(
            token_ids=torch.zeros(reqs, steps + 1, dtype=torch.int64),
            target_hidden_states=verified,
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            accepted=torch.tensor(accepted, dtype=torch.int32),
            next_tokens=torch.stack([text[0][start] for text, start in zip(texts, starts, strict=True)]),
            temperature=torch.zeros(reqs),
            seeds=torch.arange(reqs),
        )
    )
    hook.remove()
    return seen[-1].view(reqs, steps + 1, -1)[:, 1:], drafts.logits


@pytest.mark.parametrize("steps", [1, 3, MASKS])
def test_training_blocks_match_drafter_over_pages(steps):
    target, draft = make_models()
    tokens, hidden = make_text(target)
    states = run_blocks(draft, tokens, hidden, full(STARTS, steps))[:, :, :steps].flatten(0, 1)
    texts = [(tokens[b], hidden[b]) for b in range(2) for _ in STARTS[b]]
    found, logits = over_pages(draft, texts, STARTS.flatten().tolist(), steps)
    assert (states - found).abs().max() < CLOSE
    assert (draft.logits(states) - logits).abs().max() < CLOSE


@pytest.mark.outside_inference_mode
@pytest.mark.parametrize("gradient", [False, True])
def test_training_block_is_same_alone(gradient):
    target, draft = make_models()
    tokens, hidden = make_text(target)
    draft.requires_grad_(gradient)
    together = run_blocks(draft, tokens, hidden, full(STARTS, 3))[:, :, :3]
    for column in range(STARTS.shape[1]):
        alone = run_blocks(draft, tokens, hidden, full(STARTS[:, column, None], 3, padded_to=3))
        assert (together[:, column, None] - alone).abs().max() < CLOSE


def test_block_sees_only_earlier_states_and_first_token():
    target, draft = make_models()
    tokens, hidden = make_text(target)
    start, blocks = 20, full(torch.full((2, 1), 20), MASKS)
    states = run_blocks(draft, tokens, hidden, blocks)
    for position in range(tokens.shape[1]):
        others, changed = tokens.clone(), hidden.clone()
        others[:, position] = (tokens[:, position] + 1) % target.vocab_size
        changed[:, position] += torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(position))
        by_token = (run_blocks(draft, others, hidden, blocks) - states).abs().amax((1, 2, 3))
        by_state = (run_blocks(draft, tokens, changed, blocks) - states).abs().amax((1, 2, 3))
        assert bool((by_token > 100 * CLOSE).all()) if position == start else not by_token.any()
        assert bool((by_state > CLOSE).all()) if position < start else not by_state.any()


def test_blocks_are_drawn_within_text_bounds():
    tokens = torch.zeros(3, 9, dtype=torch.int64)
    torch.manual_seed(0)
    starts, lens, num_masks = draw_blocks(tokens, 500, 4)
    assert num_masks == 4 and starts.shape == lens.shape == (3, 500)
    assert set(starts.flatten().tolist()) == {1, 2, 3, 4, 5}
    assert set(lens.flatten().tolist()) == {1, 2, 3, 4}


def test_block_loss_is_weighted_distance_to_target(monkeypatch):
    target, draft = make_models()
    tokens, hidden = make_text(target)
    starts, lens = torch.tensor([[5, 9], [12, 20]]), torch.tensor([[2, 4], [1, 4]])
    place = torch.arange(4)
    # The state that predicts a mask's own place is the one before it.
    perfect = torch.stack([row[start[:, None] + place] for row, start in zip(hidden, starts, strict=True)])
    monkeypatch.setattr("train_pair.losses.draw_blocks", lambda *_: Blocks(starts, lens, 4))

    def loss(*wrong):
        states = perfect.clone()
        for at in wrong:
            states[at] = -states[at]
        monkeypatch.setattr("train_pair.losses.run_blocks", lambda *_: states)
        return block_loss(draft, target, tokens, Recipe(place_weight=0.5)).item()

    assert loss() == pytest.approx(0, abs=1e-6)
    assert loss((0, 0, 2), (1, 0, 1)) == loss()
    near, far = (kl(target, perfect[1, 1, at]) for at in (0, 3))
    total = 1.5 + 1.875 + 1 + 1.875
    assert loss((1, 1, 0)) == pytest.approx(near / total, rel=1e-4)
    assert loss((1, 1, 3)) == pytest.approx(0.125 * far / total, rel=1e-4)


def kl(target, state):
    theirs, ours = (target.logits(each).log_softmax(-1) for each in (state, -state))
    return (theirs.exp() * (theirs - ours)).sum().item()


@pytest.mark.parametrize("changes", [{"is_causal": True}, {"sliding_window": 8, "dflash_config": {"use_swa": True}}])
def test_draft_with_window_or_causality_is_rejected(changes):
    target = make_pair()[0]
    config = make_block_config(target.config)
    config |= changes | {"dflash_config": config["dflash_config"] | changes.get("dflash_config", {})}
    with pytest.raises(ValueError, match="blocks are trained without windows and causality"):
        make_draft(config, target, CPU)
