"""A pair run without a paged cache, to train and measure it. Legend: B sequences, L positions, H hidden."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spec_decode.models import Attend, EagleDraft, LlamaTarget
from spec_decode.text import decode, encode


def positions_of(tokens: torch.Tensor) -> torch.Tensor:
    """Positions [B * L] of tokens [B, L]."""
    return torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0])


def run_target(target: LlamaTarget, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states [B, L, H] for tokens [B, L]."""
    hidden: torch.Tensor = target(tokens.flatten(), positions_of(tokens), causal_attend(tokens.shape[0]))
    return hidden.view(*tokens.shape, -1)


def causal_attend(batch: int) -> Attend:
    """Attention over whole sequences."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (_heads_first(batch, x) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def unrolled_attend(inputs: torch.Tensor) -> Attend:
    """Attention of a draft that is called once a step over the same inputs [B, L].

    The query of step k sees what it would at inference: keys made from the target's states up to k positions
    back, and after those one key of each later step, its own last.
    """
    at = torch.arange(inputs.shape[1], device=inputs.device)
    lag = at[:, None] - at
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        step, groups = len(keys), query.shape[1] // key.shape[1]
        # Repeated here: the fused kernel that takes a mask knows no grouped heads.
        keys.append(_heads_first(inputs.shape[0], key).repeat_interleave(groups, 1))
        values.append(_heads_first(inputs.shape[0], value).repeat_interleave(groups, 1))
        mask = torch.cat([lag >= step, *(lag == step - own for own in range(1, step + 1))], 1)
        query = _heads_first(inputs.shape[0], query)
        out = F.scaled_dot_product_attention(query, torch.cat(keys, 2), torch.cat(values, 2), mask)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


@torch.no_grad()
def write(target: LlamaTarget, prompts: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Prompts [B, P] continued to [B, length] by the target, half of the 32-byte stretches greedily."""
    config, count = target.config, prompts.shape[0]
    shape = (config.num_layers, 2, count, config.num_kv_heads, length, config.head_dim)
    cache = torch.zeros(shape, dtype=dtype, device=prompts.device)
    heat = (torch.rand(length // 32 + 1, count, 1, device=prompts.device) * 2 - 1).clamp(min=0)
    tokens = F.pad(prompts, (0, length - prompts.shape[1]))

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache[layer, 0, :, :, at], cache[layer, 1, :, :, at] = key, value
        keys, values = cache[layer, :, :, :, : at + 1]
        out = F.scaled_dot_product_attention(query[:, :, None].to(dtype), keys, values, enable_gqa=True)
        return out[:, :, 0].to(query.dtype)

    for at in range(length - 1):
        hidden = target(tokens[:, at], torch.full_like(tokens[:, at], at), attend)
        if at + 1 >= prompts.shape[1]:
            logits = target.logits(hidden).float()
            gumbel = -torch.empty_like(logits).exponential_().log()
            tokens[:, at + 1] = (logits + heat[at // 32] * gumbel).argmax(-1)
    return tokens


@torch.no_grad()
def speculate(
    target: LlamaTarget, draft: EagleDraft, prompts: list[str], rounds: int, drafted: int
) -> tuple[float, list[str]]:
    """Greedy speculative decoding: the mean number of accepted draft tokens a round, and the texts.

    Prompts have one length. Every position is recomputed each time: attention is causal, so whatever lies
    beyond a sequence's end is harmless.
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
    for _ in range(rounds):
        _propose(draft, tokens, hidden.clone(), rows, last, drafted)
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


def _propose(
    draft: EagleDraft,
    tokens: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    last: torch.Tensor,
    drafted: int,
) -> None:
    """Write the draft's tokens after `last`; `states` [B, L, H] are the target's, the draft's from `last`."""
    attend, positions = causal_attend(tokens.shape[0]), positions_of(tokens)
    for step in range(drafted):
        inputs = tokens.roll(-1, 1).flatten()
        out = draft(inputs, states.flatten(0, 1), positions, attend).view_as(states)
        states[rows, last + step] = out[rows, last + step - 1]
        tokens[rows, last + step + 1] = draft.logits(states[rows, last + step]).argmax(-1)


def _heads_first(batch: int, flat: torch.Tensor) -> torch.Tensor:
    return flat.view(batch, -1, *flat.shape[1:]).transpose(1, 2)
