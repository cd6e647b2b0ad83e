"""Generate text with the target, with or without its draft, and without a paged cache."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spec_decode.llm.byte_tokenizer import decode, encode
from spec_decode.model_api import AttentionInputs, DraftInputs
from spec_decode.models import EagleDraft, LlamaTarget
from spec_decode.models.dflash import DFlash
from train_pair.attention import causal_attention, positions_of, run_target
from train_pair.blocks import Blocks, run_blocks
from train_pair.drafts import Draft


@torch.no_grad()
def write(target: LlamaTarget, prompts: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Let the target continue prompts [B, P] to [B, length], half of the 32-byte stretches greedily."""
    config, count = target.config, prompts.shape[0]
    window = config.sliding_window or length
    shape = (config.num_layers, 2, count, config.num_kv_heads, length, config.head_dim)
    cache = torch.zeros(shape, dtype=dtype, device=prompts.device)
    temperature = (torch.rand(length // 32 + 1, count, 1, device=prompts.device) * 2 - 1).clamp(min=0)
    tokens = F.pad(prompts, (0, length - prompts.shape[1]))

    # A target's layers have neither latents nor sinks.
    def attention(inputs: AttentionInputs) -> torch.Tensor:
        query, key, value = inputs.normed_and_rotated()
        cache[inputs.layer, 0, :, :, at], cache[inputs.layer, 1, :, :, at] = key, value
        keys, values = cache[inputs.layer, :, :, :, max(0, at + 1 - window) : at + 1]
        out = F.scaled_dot_product_attention(query[:, :, None].to(dtype), keys, values, enable_gqa=True)
        return out[:, :, 0].to(query.dtype)

    for at in range(length - 1):
        hidden = target(tokens[:, at], torch.full_like(tokens[:, at], at), attention).hidden
        if at + 1 >= prompts.shape[1]:
            logits = target.logits(hidden).float()
            gumbel = -torch.empty_like(logits).exponential_().log()
            tokens[:, at + 1] = (logits + temperature[at // 32] * gumbel).argmax(-1)
    return tokens


@torch.no_grad()
def speculate(
    target: LlamaTarget, draft: Draft, prompts: list[str], rounds: int, drafted: int
) -> tuple[float, list[str]]:
    """Run greedy speculative decoding; returns the mean number of accepted draft tokens per round, and the texts.

    Prompts have the same length. Every position is recomputed each time. Attention is causal, so tokens after a
    sequence's end have no effect.
    """
    device = target.lm_head.weight.device
    start = torch.tensor([encode(prompt) for prompt in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)[:, None]
    ahead = torch.arange(drafted + 1, device=device)
    tokens = F.pad(start, (0, (rounds + 1) * (drafted + 1)))
    # The newest committed token of each sequence; its hidden state is not known yet.
    last = torch.full_like(rows, start.shape[1])
    hidden = run_target(target, tokens)
    tokens[rows, last] = target.logits(hidden[rows, last - 1]).argmax(-1)
    total = torch.zeros((), device=device)
    propose = _propose_block if isinstance(draft, DFlash) else _propose_in_steps
    for _ in range(rounds):
        propose(draft, tokens, hidden, last, drafted)
        hidden = run_target(target, tokens)
        choice = target.logits(hidden[rows, last + ahead]).argmax(-1)
        agrees = tokens[rows, last + 1 + ahead[:-1]] == choice[:, :-1]
        accepted = agrees.long().cumprod(1).sum(1, keepdim=True)
        total += accepted.sum()
        last = last + accepted + 1
        tokens[rows, last] = choice.gather(1, accepted)
    ends = last.flatten().tolist()
    texts = [decode(row[: end + 1]) for row, end in zip(tokens.tolist(), ends, strict=True)]
    return total.item() / (rounds * len(prompts)), texts


def _propose_block(draft: DFlash, tokens: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, drafted: int) -> None:
    """Write the draft's tokens after `last` [B, 1]. hidden [B, L, H]: the target's states up to `last`."""
    states = run_blocks(draft, tokens, hidden, Blocks(last, torch.full_like(last, drafted), drafted))
    places = last + 1 + torch.arange(drafted, device=last.device)
    tokens.scatter_(1, places, draft.logits(states[:, 0]).argmax(-1))


def _propose_in_steps(
    draft: EagleDraft, tokens: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, drafted: int
) -> None:
    """The same, one token per step: from `last` on, states are the draft's own."""
    rows, states = torch.arange(len(last), device=last.device)[:, None], hidden.clone()
    attention, positions = causal_attention(tokens.shape[0], draft.config.sliding_window), positions_of(tokens)
    for step in range(drafted):
        inputs = tokens.roll(-1, 1).flatten()
        out = draft(DraftInputs(inputs, states.flatten(0, 1), positions, attention)).view_as(states)
        states[rows, last + step] = out[rows, last + step - 1]
        tokens[rows, last + step + 1] = draft.logits(states[rows, last + step]).argmax(-1)
