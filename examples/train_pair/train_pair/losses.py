"""Batches of text and the losses on them. Legend: B sequences, L positions, A blocks per sequence, K masks."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spec_decode.llm.byte_tokenizer import BOS, encode
from spec_decode.model_api import DraftInputs
from spec_decode.models import EagleDraft, LlamaTarget
from spec_decode.models.dflash import DFlash
from train_pair.attention import positions_of, run_target, unrolled_attention
from train_pair.blocks import draw_blocks, run_blocks
from train_pair.drafts import Draft
from train_pair.recipe import Recipe


class Windows:
    """Text on the device, from which windows are drawn without a host sync."""

    def __init__(self, documents: list[str], device: torch.device) -> None:
        self.bytes = torch.tensor([token for text in documents for token in encode(text)], device=device)

    def draw(self, count: int, length: int) -> torch.Tensor:
        """Draw random windows, int64 [count, length]."""
        starts = torch.randint(self.bytes.numel() - length, (count,), device=self.bytes.device)
        return self._cut(starts, length)

    def every(self, stride: int, length: int) -> torch.Tensor:
        """Return the windows that start at each multiple of stride, int64 [windows, length]."""
        starts = torch.arange(0, self.bytes.numel() - length, stride, device=self.bytes.device)
        return self._cut(starts, length)

    def _cut(self, starts: torch.Tensor, length: int) -> torch.Tensor:
        windows = self.bytes[starts[:, None] + torch.arange(length, device=starts.device)]
        # An encoded prompt begins with BOS, from any place in a document.
        windows[:, 0] = BOS
        return windows


def target_loss(target: LlamaTarget, tokens: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
    """Return the cross-entropy of the next byte, fp32 []. tokens: int64 [B, L + 1].

    Each sequence reads wrong bytes at a rate drawn from [0, noise].
    """
    rate = noise * torch.rand_like(tokens[:, :1], dtype=torch.float32)
    wrong = torch.rand_like(tokens, dtype=torch.float32) < rate
    read = torch.where(wrong, tokens.flip(0, 1), tokens)
    logits = target.logits(run_target(target, read[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def draft_loss(draft: Draft, target: LlamaTarget, tokens: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the loss of a draft of either kind, fp32 []. tokens: int64 [B, L + 1]."""
    loss = block_loss if isinstance(draft, DFlash) else unrolled_loss
    return loss(draft, target, tokens, recipe)


def unrolled_loss(draft: EagleDraft, target: LlamaTarget, tokens: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the distance from the target's distribution (KL) and hidden states over unrolled steps, fp32 [].

    tokens int64 [B, L + 1].
    """
    with torch.no_grad():
        hidden = run_target(target, tokens)
        target_log_probs = target.logits(hidden).float().log_softmax(-1)
    inputs = tokens[:, 1:]
    attention, positions = unrolled_attention(inputs, draft.config.sliding_window), positions_of(inputs)
    state, loss = hidden[:, :-1], torch.zeros((), device=tokens.device)
    for step in range(recipe.unroll):
        out = draft(DraftInputs(inputs.flatten(), state.flatten(0, 1), positions, attention)).view(*inputs.shape, -1)
        # The first `step` positions have no draft state before them.
        states, target_states = out[:, step:], hidden[:, 1 + step :]
        log_probs = draft.logits(states).float().log_softmax(-1).flatten(0, 1)
        kl = F.kl_div(log_probs, target_log_probs[:, 1 + step :].flatten(0, 1), log_target=True, reduction="batchmean")
        distance = F.smooth_l1_loss(states, target_states)
        loss = loss + recipe.step_weight**step * (kl + recipe.hidden_weight * distance)
        state = F.pad(out[:, :-1], (0, 0, 1, 0))
    return loss


def block_loss(draft: DFlash, target: LlamaTarget, tokens: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the distance from the target's distribution (KL) at masks of random blocks, fp32 []. tokens: int64 [B, L].

    A mask further from its block's start counts less: it is useful only if all before it were accepted.
    """
    blocks = draw_blocks(tokens, recipe.blocks, draft.config_json["block_size"] - 1)
    place = torch.arange(blocks.num_masks, device=tokens.device)
    with torch.no_grad():
        hidden = run_target(target, tokens)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        # A mask predicts the token at its own position, the target the one after.
        at_masks = hidden[rows, blocks.starts[..., None] + place]
        target_log_probs = target.logits(at_masks).float().log_softmax(-1)
    log_probs = draft.logits(run_blocks(draft, tokens, hidden, blocks)).float().log_softmax(-1)
    kl = F.kl_div(log_probs, target_log_probs, log_target=True, reduction="none").sum(-1)
    weight = recipe.place_weight**place * (place < blocks.lens[..., None])
    return (kl * weight).sum() / weight.sum()
