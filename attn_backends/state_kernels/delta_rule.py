"""A step of the gated delta rule, or of Kimi Delta Attention, after its convolution: the tokens of a block at once.

The WY form of arXiv:2412.06464, section 3.3, with a decay per channel as in arXiv:2510.26692. For a block of tokens
with S before it, G_i the sum of log decays on token i's path and rel_ij = exp(G_i - G_j) for j on that path,

    u_i = beta_i (v_i - S^T (exp(G_i) k_i) - sum over j < i of (k_i . rel_ij k_j) u_j)
    out_i = S^T (exp(G_i) q_i) + sum over j <= i of (q_i . rel_ij k_j) u_j
    S after = exp(G_last) S + sum over j of (rel_last,j k_j) u_j^T

The first kernel writes what no state enters: G; solve, with u = solve (v - S^T (exp(G) k)); and score, the factors of
u_j in out_i. The second has the states. A step is one block whose u join the journal; a prompt is block after block.

Shape legend: T query tokens, R requests, S slots, J journal entries, H key heads, HV value heads, Dk and Dv their dims,
W the convolution's width, C channels, G log decays of a value head (1 or Dk), B tokens of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_backends.state import StateInputs
from attn_backends.state_cache import StateCache, StateLengths
from attn_backends.state_kernels.convolution import launch_convolution
from attn_backends.state_kernels.rows import metadata_of, plan_arguments, plan_row, write_entries
from attn_backends.torch_state import TorchState
from builders import Recurrence, StateMetadata, StateSpec
from builders.kernels.op import define_op
from builders.kernels.sizes import cdiv, next_power_of_2
from builders.kernels.triton_runtime import await_previous, dependent_launch, stored_as, tl, triton

_BLOCK_T, _BLOCK_K, _BLOCK_V = 16, 16, 32
"""Tokens of a block, at least; rows of a slice of a state; and columns of it per program, which holds its slices in
registers. Longer blocks, and products over whole columns, would need more registers than there are."""


class DeltaRuleStep(NamedTuple):
    """Take in the query tokens of a layer; returns [T, HV, Dv] in x's dtype, see `StateBackend.forward`.

    x, decay, beta, weight, bias: see `StateInputs`; x with any strides but a contiguous last dim
    state, conv, key, update, decays: see `StateCache`; contiguous
    base, held: see `StateLengths`; read only
    query_start_loc  int32 [R + 1]; tokens from query_start_loc[R] on belong to no request, their output is undefined
    seq_lens         int32 [R]
    slots            int32 [R], any stride; those of live rows are distinct
    tree_masks       int64 [T], or None
    max_query_len    like all that follow, a capture constant
    max_seq_len, absorb, may_fold, reserve: as in `StateMetadata`
    """

    x: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor
    conv: torch.Tensor
    key: torch.Tensor
    update: torch.Tensor
    decays: torch.Tensor
    base: torch.Tensor
    held: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    tree_masks: torch.Tensor | None
    max_query_len: int
    max_seq_len: int
    absorb: bool
    may_fold: bool
    reserve: int

    @classmethod
    def of(cls, inputs: StateInputs, cache: StateCache, metadata: StateMetadata) -> DeltaRuleStep:
        """Return the arguments for a layer's step."""
        return cls(
            x=inputs.x,
            decay=inputs.decay,
            beta=inputs.beta,
            weight=inputs.weight,
            bias=inputs.bias,
            state=cache.state,
            conv=cache.conv,
            key=cache.key,
            update=cache.update,
            decays=cache.decay,
            base=cache.lengths.base,
            held=cache.lengths.held,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            slots=metadata.slots,
            tree_masks=metadata.tree_masks,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            absorb=metadata.absorb,
            may_fold=metadata.may_fold,
            reserve=metadata.reserve,
        )

    def reference(self) -> torch.Tensor:
        _, value_heads, key_dim, value_dim = self.state.shape
        spec = StateSpec(
            num_key_heads=self.key.shape[2],
            num_value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            journal=self.key.shape[1],
            recurrence=Recurrence.KDA if self.decay.dim() == 3 else Recurrence.GATED_DELTA,
            conv_width=self.weight.shape[1],
            dtype=self.x.dtype,
            tree=self.tree_masks is not None,
        )
        lengths = StateLengths(self.base, self.held, torch.zeros_like(self.held))
        cache = StateCache(self.state, self.conv, self.key, self.update, self.decays, lengths)
        metadata = metadata_of(self, num_tokens=len(self.x), max_query_len=self.max_query_len)
        return TorchState().forward(StateInputs(*self[:5]), cache, metadata, spec=spec)

    def fake(self) -> torch.Tensor:
        return self.x.new_empty(len(self.x), *self.update.shape[2:])

    def launch(self) -> torch.Tensor:
        (_, journal, heads, key_dim), (value_heads, value_dim) = self.key.shape, self.update.shape[2:]
        plan, num_reqs = plan_arguments(self, journal), len(self.seq_lens)
        mixed, replaced_key = launch_convolution(
            self.x, self.weight, self.bias, self.tree_masks, self.conv, self.key, value_heads, value_dim,
            self.max_query_len, plan,
        )  # fmt: skip
        block_t = _BLOCK_T if self.absorb else max(_BLOCK_T, next_power_of_2(self.max_query_len))
        block_v = max(16, min(_BLOCK_V, next_power_of_2(value_dim)))  # tl.dot needs 16
        decay = self.decay.contiguous()
        replaced = decay.new_empty(num_reqs, *self.decays.shape[1:]) if replaced_key is not self.key else self.decays
        solve, score = (mixed.new_empty(len(self.x), value_heads, block_t) for _ in range(2))
        sums = decay.new_empty(decay.shape)
        shared: dict[str, Any] = {
            "mixed_ptr": mixed,
            "decay_ptr": decay,
            "solve_ptr": solve,
            "score_ptr": score,
            "sums_ptr": sums,
            "decays_ptr": self.decays,
            "replaced_decays_ptr": replaced,
            "HEADS": heads,
            "VALUE_HEADS": value_heads,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_T": block_t,
            "PER_CHANNEL": decay.dim() == 3,
            "PRECISION": "ieee" if mixed.device.type == "cpu" else "tf32x3",
            **plan,
        }
        blocks = cdiv(self.max_query_len, block_t)
        _delta_rule_tokens_kernel[(num_reqs * blocks, value_heads)](
            beta_ptr=self.beta.contiguous(),
            tree_masks_ptr=self.tree_masks,
            num_blocks=blocks,
            BLOCK_K=max(16, next_power_of_2(key_dim)),
            TREE=self.tree_masks is not None,
            num_warps=4 if block_t <= 16 else 8,
            **shared,
            **dependent_launch(self.x.device),
        )
        out = stored_as(self.fake())
        _delta_rule_state_kernel[(cdiv(value_dim, block_v), value_heads, num_reqs)](
            state_ptr=self.state,
            key_ptr=self.key,
            update_ptr=self.update,
            replaced_key_ptr=replaced_key,
            o_ptr=out,
            BLOCK_K=_BLOCK_K,
            BLOCK_V=block_v,
            BLOCK_J=16,
            num_warps=4 if block_t <= 16 else 8,
            num_stages=1,
            **shared,
            **dependent_launch(self.x.device),
        )
        return out.to(self.x.dtype)


@triton.jit
def load_slice(ptrs, mask, at: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns of rows, [B, BLOCK] from column `at` on, or [B, 1] of rows that have one; ptrs and mask: [B, 1],
    to the first column of each row. 0 where masked and from column DIM on."""
    if DIM == 1:
        return tl.load(ptrs, mask=mask, other=0.0)
    else:
        offs = at + tl.arange(0, BLOCK)[None, :]
        return tl.load(ptrs + offs, mask=mask & (offs < DIM), other=0.0)


@triton.jit
def bounded(g):
    """Return log decays from which sums keep their bits, and differences are numbers: exp(-100) is 0 in fp32."""
    return tl.maximum(g, -100.0)


@triton.jit
def take_in(
    states,
    k_ptrs,
    g_ptrs,
    mask,
    u,
    KEY_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the slices [BLOCK_K, Dv] of a state after a chain of tokens, with their keys, log decays and u [B, Dv]."""
    after = ()
    for at in tl.static_range(len(states)):
        g = bounded(load_slice(g_ptrs, mask, at * BLOCK_K, DECAYS, BLOCK_K))
        total = tl.sum(g, 0)
        k = load_slice(k_ptrs, mask, at * BLOCK_K, KEY_DIM, BLOCK_K) * tl.exp(total[None, :] - tl.cumsum(g, 0))
        state = states[at] * tl.exp(total)[:, None]
        after = after + (tl.dot(tl.trans(k), u, acc=state, input_precision=PRECISION),)  # type: ignore[assignment]
    return after


@triton.jit
def _delta_rule_tokens_kernel(
    mixed_ptr,  # fp32 [T, C]: q, k and v after the convolution
    decay_ptr,  # fp32 [T, HV, G]
    beta_ptr,  # fp32 [T, HV]
    tree_masks_ptr,  # int64 [T], or None
    solve_ptr,  # out: fp32 [T, HV, B]: row i of a block's solve
    score_ptr,  # out: fp32 [T, HV, B]: column j of a block's score
    sums_ptr,  # out: fp32 [T, HV, G]: sums of the log decays of a block's paths
    decays_ptr,  # in and out: fp32 [S, J, HV, G]
    replaced_decays_ptr,  # out: fp32 [R, J, HV, G]
    base_ptr,  # int32 [S]
    held_ptr,  # int32 [S]
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    slots_ptr,  # int32 [R]
    num_blocks,  # per request
    max_seq_len,
    num_slots,  # S
    reserve,
    stride_slots,
    HEADS: tl.constexpr,  # H
    VALUE_HEADS: tl.constexpr,  # HV
    KEY_DIM: tl.constexpr,  # Dk
    VALUE_DIM: tl.constexpr,  # Dv
    JOURNAL: tl.constexpr,  # J
    BLOCK_T: tl.constexpr,  # B
    BLOCK_K: tl.constexpr,  # Dk, rounded up to a power of two
    PER_CHANNEL: tl.constexpr,
    ABSORB: tl.constexpr,
    MAY_FOLD: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """solve = (I + beta tril(k . rel k))^-1 beta and score = tril(q . rel k), and the decays of the journal. One
    program per block of a row and value head; grid [R * num_blocks, HV]."""
    CHANNELS: tl.constexpr = 2 * HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = KEY_DIM if PER_CHANNEL else 1
    BLOCK_G: tl.constexpr = BLOCK_K if PER_CHANNEL else 1
    await_previous(PDL)
    row = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    value_head = tl.program_id(1)
    q_start, q_len, slot, replay, _, _, fold, _ = plan_row(
        row, base_ptr, held_ptr, query_start_loc_ptr, seq_lens_ptr, slots_ptr, max_seq_len, num_slots, reserve,
        stride_slots, JOURNAL, ABSORB, MAY_FOLD,
    )  # fmt: skip
    count = tl.minimum(q_len - block * BLOCK_T, BLOCK_T)
    if count <= 0:
        return

    # 1. Load q, k [B, Dk] and sum the decays of each path
    i = tl.arange(0, BLOCK_T)
    mask_t = i < count
    first_token = (q_start + block * BLOCK_T).to(tl.int64)
    token = first_token + i
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    offs_g = tl.arange(0, BLOCK_G)[None, :]
    k_head = HEADS + value_head // (VALUE_HEADS // HEADS)
    q_ptrs = mixed_ptr + token[:, None] * CHANNELS + (k_head - HEADS) * KEY_DIM + offs_k
    mask_k = mask_t[:, None] & (offs_k < KEY_DIM)
    q = tl.load(q_ptrs, mask=mask_k, other=0.0)
    k = tl.load(q_ptrs + HEADS * KEY_DIM, mask=mask_k, other=0.0)
    offs = (token[:, None] * VALUE_HEADS + value_head) * DECAYS + offs_g
    mask_g = mask_t[:, None] & (offs_g < DECAYS)
    g = tl.load(decay_ptr + offs, mask=mask_g, other=0.0)
    bound = bounded(g)
    seen = i[None, :] <= i[:, None]
    if TREE:
        masks = tl.load(tree_masks_ptr + token, mask=mask_t, other=0)[:, None]
        on_path = (masks >> i[None, :].to(tl.int64)) & 1 == 1
        seen = seen & (on_path | (i[None, :] == i[:, None]))
    if PER_CHANNEL:
        sums = tl.dot(seen.to(tl.float32), bound, input_precision=PRECISION)
    else:
        sums = tl.sum(tl.where(seen, tl.trans(bound), 0.0), 1)[:, None]
    tl.store(sums_ptr + offs, sums, mask=mask_g)

    # 2. Token after token, eliminate its update from those of the tokens that see it
    solve = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for j in range(count):
        k_ptrs = mixed_ptr + (first_token + j) * CHANNELS + k_head * KEY_DIM + offs_k
        key = tl.load(k_ptrs, mask=offs_k < KEY_DIM, other=0.0)
        own = i[:, None] == j
        sum_j = tl.sum(tl.where(own, sums, 0.0), 0)[None, :]
        key = key * tl.exp(tl.minimum(sums - sum_j, 0.0))
        sees = tl.max(tl.where(seen & (i[None, :] == j), 1, 0), 1) > 0
        overlap = tl.where(sees & (i > j), tl.sum(k * key, 1), 0.0)
        score = tl.where(sees, tl.sum(q * key, 1), 0.0)
        beta = tl.load(beta_ptr + (first_token + j) * VALUE_HEADS + value_head)
        solved = beta * tl.sum(tl.where(own, solve, 0.0), 0)[None, :]
        solve = tl.where(own, solved, solve - overlap[:, None] * solved)
        tl.store(score_ptr + ((first_token + j) * VALUE_HEADS + value_head) * BLOCK_T + i, score)
    solve_ptrs = solve_ptr + (token[:, None] * VALUE_HEADS + value_head) * BLOCK_T + i[None, :]
    tl.store(solve_ptrs, solve, mask=mask_t[:, None])

    # 3. The journal
    if not ABSORB:
        write_entries(
            g,
            decays_ptr + (slot * (JOURNAL * VALUE_HEADS) + value_head) * DECAYS,
            replaced_decays_ptr + (row.to(tl.int64) * (JOURNAL * VALUE_HEADS) + value_head) * DECAYS,
            tl.where(fold, 0, replay),
            q_len,
            replay,
            fold,
            VALUE_HEADS * DECAYS,
            DECAYS,
            JOURNAL,
            BLOCK_T,
            BLOCK_G,
        )


@triton.jit
def _delta_rule_state_kernel(
    mixed_ptr,  # fp32 [T, C]: q, k and v after the convolution
    decay_ptr,  # fp32 [T, HV, G]
    solve_ptr,  # fp32 [T, HV, B]
    score_ptr,  # fp32 [T, HV, B], transposed
    sums_ptr,  # fp32 [T, HV, G]
    state_ptr,  # in and out: fp32 [S, HV, Dk, Dv]
    key_ptr,  # fp32 [S, J, H, Dk]
    update_ptr,  # in and out: fp32 [S, J, HV, Dv]
    decays_ptr,  # fp32 [S, J, HV, G]
    replaced_key_ptr,  # fp32 [R, J, H, Dk]: entries of the journal that a fold has overwritten
    replaced_decays_ptr,  # fp32 [R, J, HV, G]: likewise
    o_ptr,  # out: [T, HV, Dv]
    base_ptr,  # int32 [S]
    held_ptr,  # int32 [S]
    query_start_loc_ptr,  # int32 [R + 1]
    seq_lens_ptr,  # int32 [R]
    slots_ptr,  # int32 [R]
    max_seq_len,
    num_slots,  # S
    reserve,
    stride_slots,
    HEADS: tl.constexpr,  # H
    VALUE_HEADS: tl.constexpr,  # HV
    KEY_DIM: tl.constexpr,  # Dk
    VALUE_DIM: tl.constexpr,  # Dv
    JOURNAL: tl.constexpr,  # J
    BLOCK_T: tl.constexpr,  # B
    BLOCK_K: tl.constexpr,  # rows of a slice of the state
    BLOCK_V: tl.constexpr,  # columns of the state per program
    BLOCK_J: tl.constexpr,  # entries that are replayed at once
    PER_CHANNEL: tl.constexpr,
    ABSORB: tl.constexpr,
    MAY_FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Replay the journal, take in the row's tokens block after block, and write outputs, the checkpoint and updates.
    One program per row, value head and BLOCK_V columns of its state; grid [Dv / BLOCK_V, HV, R]."""
    CHANNELS: tl.constexpr = 2 * HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = KEY_DIM if PER_CHANNEL else 1
    SLICES: tl.constexpr = (KEY_DIM + BLOCK_K - 1) // BLOCK_K
    await_previous(PDL)
    value_head = tl.program_id(1)
    row = tl.program_id(2)
    q_start, q_len, slot, replay, live, fresh, fold, _ = plan_row(
        row, base_ptr, held_ptr, query_start_loc_ptr, seq_lens_ptr, slots_ptr, max_seq_len, num_slots, reserve,
        stride_slots, JOURNAL, ABSORB, MAY_FOLD,
    )  # fmt: skip
    i = tl.arange(0, BLOCK_T)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    mask_v = offs_v < VALUE_DIM
    if live == 0:
        # 1. A row that is padding or lost outputs 0
        q_len = tl.load(query_start_loc_ptr + row + 1) - q_start
        for start in range(0, q_len, BLOCK_T):
            token = (q_start + start + i).to(tl.int64)[:, None]
            mask = (start + i < q_len)[:, None] & mask_v
            zeros = tl.zeros((BLOCK_T, BLOCK_V), o_ptr.dtype.element_ty)
            tl.store(o_ptr + (token * VALUE_HEADS + value_head) * VALUE_DIM + offs_v, zeros, mask=mask)
        return

    # 2. Load the checkpoint [Dk, Dv] in slices, and replay the journal
    k_head = value_head // (VALUE_HEADS // HEADS)
    rows = tl.arange(0, BLOCK_K)[:, None]
    state_ptrs = state_ptr + ((slot * VALUE_HEADS + value_head) * KEY_DIM + rows) * VALUE_DIM + offs_v
    states = ()
    for at in tl.static_range(SLICES):
        mask_s = (at * BLOCK_K + rows < KEY_DIM) & mask_v & (fresh == 0)
        state = tl.load(state_ptrs + at * BLOCK_K * VALUE_DIM, mask=mask_s, other=0.0)
        states = states + (state,)  # type: ignore[assignment]
    update_ptr += slot * (JOURNAL * VALUE_HEADS * VALUE_DIM) + value_head * VALUE_DIM
    key_ptr += slot * (JOURNAL * HEADS * KEY_DIM)
    decays_ptr += slot * (JOURNAL * VALUE_HEADS * DECAYS)
    if (not ABSORB) and MAY_FOLD:
        key_ptr = tl.where(fold, replaced_key_ptr + row.to(tl.int64) * (JOURNAL * HEADS * KEY_DIM), key_ptr)
        replaced = replaced_decays_ptr + row.to(tl.int64) * (JOURNAL * VALUE_HEADS * DECAYS)
        decays_ptr = tl.where(fold, replaced, decays_ptr)
    for start in range(0, replay, BLOCK_J):
        entry = start + tl.arange(0, BLOCK_J)[:, None]
        mask_j = entry < replay
        k_ptrs = key_ptr + (entry * HEADS + k_head) * KEY_DIM
        g_ptrs = decays_ptr + (entry * VALUE_HEADS + value_head) * DECAYS
        u = tl.load(update_ptr + entry * (VALUE_HEADS * VALUE_DIM) + offs_v, mask=mask_j & mask_v, other=0.0)
        states = take_in(states, k_ptrs, g_ptrs, mask_j, u, KEY_DIM, DECAYS, BLOCK_K, PRECISION)
    if fold & (not ABSORB):
        for at in tl.static_range(SLICES):
            mask_s = (at * BLOCK_K + rows < KEY_DIM) & mask_v
            tl.store(state_ptrs + at * BLOCK_K * VALUE_DIM, states[at], mask=mask_s)

    # 3. The tokens
    for start in range(0, q_len, BLOCK_T):
        mask_t = (start + i < q_len)[:, None]
        token = (q_start + start + i).to(tl.int64)[:, None]
        of_head = token * VALUE_HEADS + value_head
        q_ptrs = mixed_ptr + token * CHANNELS + k_head * KEY_DIM
        k_ptrs = q_ptrs + HEADS * KEY_DIM
        v_ptrs = mixed_ptr + token * CHANNELS + 2 * HEADS * KEY_DIM + value_head * VALUE_DIM + offs_v
        known = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        o = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for at in tl.static_range(SLICES):
            decayed = tl.exp(load_slice(sums_ptr + of_head * DECAYS, mask_t, at * BLOCK_K, DECAYS, BLOCK_K))
            k = load_slice(k_ptrs, mask_t, at * BLOCK_K, KEY_DIM, BLOCK_K) * decayed
            q = load_slice(q_ptrs, mask_t, at * BLOCK_K, KEY_DIM, BLOCK_K) * decayed
            known = tl.dot(k, states[at], acc=known, input_precision=PRECISION)
            o = tl.dot(q, states[at], acc=o, input_precision=PRECISION)
        v = tl.load(v_ptrs, mask=mask_t & mask_v, other=0.0)
        solve = tl.load(solve_ptr + of_head * BLOCK_T + i[None, :], mask=mask_t, other=0.0)
        u = tl.dot(solve, v - known, input_precision=PRECISION)
        score = tl.load(score_ptr + tl.trans(of_head) * BLOCK_T + i[:, None], mask=tl.trans(mask_t), other=0.0)
        o = tl.dot(score, u, acc=o, input_precision=PRECISION)
        tl.store(o_ptr + of_head * VALUE_DIM + offs_v, o, mask=mask_t & mask_v)
        if ABSORB:
            g_ptrs = decay_ptr + of_head * DECAYS
            states = take_in(states, k_ptrs, g_ptrs, mask_t, u, KEY_DIM, DECAYS, BLOCK_K, PRECISION)
        else:
            entry = (tl.where(fold, 0, replay) + i)[:, None]
            mask_u = mask_t & mask_v & (entry < JOURNAL)
            tl.store(update_ptr + entry * (VALUE_HEADS * VALUE_DIM) + offs_v, u, mask=mask_u)
    if ABSORB:
        for at in tl.static_range(SLICES):
            mask_s = (at * BLOCK_K + rows < KEY_DIM) & mask_v
            tl.store(state_ptrs + at * BLOCK_K * VALUE_DIM, states[at], mask=mask_s)


delta_rule_step = define_op(
    "attn_backends::delta_rule_step",
    DeltaRuleStep,
    mutates=("state", "conv", "key", "update", "decays"),
)
