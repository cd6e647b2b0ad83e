"""The specification of recurrent state: plain torch, one token after the other in fp32, any device."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_backends.capabilities import Sizes
from attn_backends.state import StateBackend, StateInputs, check_state_inputs
from attn_backends.state_cache import StateCache, StepPlan, appended, factors, replayed, store
from attn_backends.state_capabilities import StateCapabilities, StateFeature
from builders import Recurrence, StateMetadata, StateSpec

_NORM_EPS = 1e-6


class TorchState(StateBackend):
    """Replays the journal and takes in each query token by the same operations."""

    name = "torch_state"
    version = str(torch.__version__)
    contract_version = (1, 3)
    capabilities = StateCapabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
        recurrences=tuple(Recurrence),
        key_dims=Sizes(),
        value_dims=Sizes(),
        conv_widths=Sizes(),
        journals=Sizes(),
        features=frozenset(StateFeature),
        compute_capability=(7, 0),
    )

    def forward(self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, *, spec: StateSpec) -> Tensor:
        check_state_inputs(inputs, cache, metadata, spec)
        plan = self.plan_step(cache.lengths, metadata, spec)
        state, window = self.replay(cache, plan)
        # 1. The tokens of each row, and their convolution
        token, valid = _tokens_of_rows(metadata, plan)
        x, decay, beta = (_select(part, token, valid) for part in (inputs.x, inputs.decay, inputs.beta))
        parents = _parents(metadata, token)
        mixed = _convolve(x, window, parents, inputs)
        if spec.recurrence.rule.activates:
            mixed = F.silu(mixed)
        q, key, value = _split(mixed, spec)
        # 2. Each token after its parent; one that is no token of the row has decay exp(0) and update 0
        after, update, out = [state], value[:, :, : spec.matrices], value
        if spec.recurrence.rule.has_matrix:
            after, update, out = _recur(state, (q, key, value, decay, beta), parents, metadata, spec)
        if inputs.skip is not None:
            out = out + inputs.skip[:, None] * value
        # 3. What the slots hold next
        if metadata.absorb:
            ends = plan.query_lens[:, None] + torch.arange(spec.conv_width - 1, device=x.device)
            store(cache.state, plan.slot, plan.live, after[-1])
            self.store_window(cache, plan, plan.live, _take(torch.cat([window, x], 1), ends))
        else:
            store(cache.state, plan.slot, plan.fold, state)
            self.store_window(cache, plan, plan.fold, window)
            inputs_of_journal = cache.conv[:, spec.conv_width - 1 :]
            journal = (inputs_of_journal, cache.key, cache.update, cache.decay)
            for part, new in zip(journal, (x, key, update, decay), strict=True):
                store(part, plan.slot, plan.live, appended(part[plan.slot], new, plan.first_entry, plan.query_lens))
        return _by_token(out, metadata, plan).to(spec.dtype)

    def replay(self, cache: StateCache, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Return the state and the convolution's window before each row's tokens; see `replayed`."""
        return replayed(cache, plan.slot, plan.replay, plan.live & ~plan.fresh)

    def store_window(self, cache: StateCache, plan: StepPlan, rows: Tensor, window: Tensor) -> None:
        """Make these windows [R, W - 1, channels] those of the checkpoints of the given rows, bool [R]."""
        store(cache.conv[:, : window.shape[1]], plan.slot, rows, window)


def _recur(
    state: Tensor, tokens: tuple[Tensor, ...], parents: Tensor, metadata: StateMetadata, spec: StateSpec
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the states to go on from, of which the last token's is last, and the tokens' updates and outputs, fp32
    [R, Q, num_value_heads, value_dim] each. tokens: q, key, value, decay and beta [R, Q, ...]"""
    q, key, value, decay, beta = tokens
    after, updates, outputs, factor = [state], [], [], factors(decay)
    for i in range(metadata.max_query_len):
        before = after[-1] if metadata.tree_masks is None else _take(torch.stack(after, 1), parents[:, i] + 1)
        head, query = (part[:, i].repeat_interleave(spec.group_size, 1)[..., None] for part in (key, q))
        kept, update = before * factor[:, i], value[:, i]
        if spec.recurrence.rule.subtracts:
            update = update - (head * kept).sum(2)
        updates.append(beta[:, i, :, None] * update)
        if metadata.tree_masks is None:
            after = []
        after.append(kept + head * updates[-1][:, :, None])
        outputs.append((query * after[-1]).sum(2))
    return after, torch.stack(updates, 1), torch.stack(outputs, 1)


def _tokens_of_rows(metadata: StateMetadata, plan: StepPlan) -> tuple[Tensor, Tensor]:
    """Return the batch's token at each place of a row, int64 [R, Q], and whether it is one of a live row."""
    place = torch.arange(metadata.max_query_len, device=plan.slot.device)
    token = metadata.query_start_loc[:-1, None].long() + place
    return token.clamp(max=metadata.num_tokens - 1), place < plan.query_lens[:, None]


def _select(part: Tensor, token: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid.view(*valid.shape, *(1,) * (part.dim() - 1)), part[token], 0.0)


def _parents(metadata: StateMetadata, token: Tensor) -> Tensor:
    """Return the place of each token's parent in its row, int64 [R, Q]; -1 is the context."""
    place = torch.arange(token.shape[1], device=token.device)
    if metadata.tree_masks is None:
        return (place - 1).expand_as(token)
    # Ancestors come in the order of their path, so the parent is the last of them.
    ancestors = (metadata.tree_masks[token][..., None] >> place & 1).bool() & (place < place[:, None])
    return torch.where(ancestors, place, -1).amax(-1)


def _convolve(x: Tensor, window: Tensor, parents: Tensor, inputs: StateInputs) -> Tensor:
    """Return the convolution of x [R, Q, C] over each token's path, fp32; window [R, W - 1, C] comes before it."""
    known, width = torch.cat([window, x], 1).float(), inputs.weight.shape[1]
    # Where the input before each known one is; that before the first is never used.
    earlier = torch.arange(-1, width - 2, device=x.device).expand(len(x), -1)
    before = torch.cat([earlier, parents + width - 1], 1).clamp(min=0)
    place = torch.arange(x.shape[1], device=x.device).expand(len(x), -1) + width - 1
    mixed = torch.zeros_like(x, dtype=torch.float32)
    for column in reversed(range(width)):
        mixed = mixed + _take(known, place) * inputs.weight[:, column].float()
        place = before.gather(1, place)
    return mixed if inputs.bias is None else mixed + inputs.bias.float()


def _split(mixed: Tensor, spec: StateSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and key [R, Q, H, key_dim], and value [R, Q, HV, value_dim]."""
    keys, value_heads = (spec.num_key_heads, spec.key_dim), (spec.num_value_heads, spec.value_dim)
    parts = mixed.split([prod(keys), prod(keys), prod(value_heads)], -1)
    dims = (keys, keys, value_heads)
    q, key, value = (part.view(*mixed.shape[:2], *each) for part, each in zip(parts, dims, strict=True))
    return (_unit(q) * spec.key_dim**-0.5, _unit(key), value) if spec.recurrence.rule.normalises else (q, key, value)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _NORM_EPS)


def _take(rows: Tensor, place: Tensor) -> Tensor:
    """Return rows[r, place[r]] for each row r; place is int64 [R] or [R, n]."""
    row = torch.arange(len(rows), device=rows.device)
    return rows[row if place.dim() == 1 else row[:, None], place]


def _by_token(out: Tensor, metadata: StateMetadata, plan: StepPlan) -> Tensor:
    """Return outputs [R, Q, ...] by token of the batch; 0 for a token of no live row."""
    starts = metadata.query_start_loc.long()
    token = torch.arange(metadata.num_tokens, device=out.device)
    row = torch.searchsorted(starts[1:], token, right=True).clamp(max=metadata.num_reqs - 1)
    place = token - starts[row]
    valid = (place < plan.query_lens[row]).view(-1, *(1,) * (out.dim() - 2))
    return torch.where(valid, out[row, place.clamp(max=out.shape[1] - 1)], 0.0)
