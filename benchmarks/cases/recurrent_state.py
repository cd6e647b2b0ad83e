"""A step of recurrent state, whose rejected tokens vanish with the lengths, beside kernels that write 1 + K states.

The same convolved tokens, and requests at every stage of a journal, so that as many fold as in serving where half of
the drafts are accepted. The peer of our own is the fastest of several tilings; that of vLLM is its own fused kernel,
without its convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from attn_backends import NoBackend, Rejected, StateCache, StateInputs, get_state
from attn_backends.state_kernels.convolution import launch_convolution
from attn_backends.state_kernels.rows import plan_arguments
from attn_backends.state_kernels.step import StateStep, state_step
from benchmarks.column_states import ColumnStates, column_states
from benchmarks.decode_fixture import COLD_BYTES, shuffled_tables
from benchmarks.measure import time_call, time_in_turn
from benchmarks.rows import Bench, BenchRow, with_limits
from builders import BatchBuffers, Recurrence, StateBuilder, StateSpec
from spec_decode.paged.kv_groups import JOURNAL_STEPS
from spec_decode.tools.timing_limit import TimingLimit

CASE = "recurrent-state"
_OURS = "triton_state"
_QWEN3_5 = StateSpec(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, journal=1)
_KIMI = replace(_QWEN3_5, num_key_heads=32, num_value_heads=32, recurrence=Recurrence.KDA)
_NEMOTRON = replace(_QWEN3_5, num_key_heads=8, num_value_heads=128, value_dim=64, recurrence=Recurrence.SSD)
_SHAPES = ((7, 3, 15), (1, 32, 8, 64), (_QWEN3_5, _KIMI, _NEMOTRON))
"""Drafted tokens K, requests, and layers: a run that is cut off has timed every recurrence."""
_TINY: dict[str, Any] = {"num_key_heads": 1, "num_value_heads": 2, "key_dim": 16, "value_dim": 16}
_SHAPES_ON_CPU = ((3,), (3,), (replace(_QWEN3_5, **_TINY), replace(_NEMOTRON, **_TINY)))
TILES = ((16, 1), (32, 2), (64, 4))
"""Columns of a state per program, and warps, of which the peer takes the fastest."""
_ROUNDING = 0.02
"""Relative to the norm of our result; a peer that differs by more does other work, so its time is meaningless."""
_CONTEXT = 64
_FLOOR = "the states, the entries replayed and written, the tokens"
Call = Callable[["Layer"], torch.Tensor]


class Layer(NamedTuple):
    """A layer's step: the arguments of our op; those that convolve for a peer, whose window is its own; and the states
    fp32 [R, 1 + Q, HV, Dk, Dv] of the columns, all as before the step."""

    ours: StateStep
    peers: StateStep
    columns: torch.Tensor

    def convolved(self) -> torch.Tensor:
        """Return [q | k | v] fp32 [R * Q, C] for a peer."""
        return launch_convolution(self.peers, plan_arguments(self.peers, self.peers.key.shape[1])).mixed


class TimedStep:
    """Layers of one step of `queries` tokens of each request, the requests of each layer at other stages of a journal.

    Together the states are not in the L2 cache. moved_bytes: what a layer's step must move, on average.
    """

    def __init__(self, spec: StateSpec, queries: int, num_reqs: int, device: torch.device) -> None:
        """Raises NoBackend if our backend rejects the spec."""
        if isinstance(verdict := get_state(_OURS).supports(spec, device), Rejected):
            raise NoBackend(f"{_OURS} rejects [{spec.describe()}]: {'; '.join(verdict.reasons)}")
        self.spec, self.queries, self.num_reqs, self.device = spec, queries, num_reqs, device
        accepted = (queries + 1) // 2
        stages = range(accepted, spec.journal - queries + accepted + 1, accepted)
        state = num_reqs * spec.num_value_heads * spec.key_dim * spec.value_dim * spec.state_dtype.itemsize
        count = max(len(stages), min(64, -(-COLD_BYTES // state))) if device.type == "cuda" else 1
        replays = [[stages[(layer + row) % len(stages)] for row in range(num_reqs)] for layer in range(count)]
        self.layers = [self._layer(each) for each in replays]
        self.moved_bytes = sum(map(self._bytes, replays)) / count

    def _bytes(self, replays: list[int]) -> int:
        spec = self.spec
        state = spec.num_value_heads * spec.key_dim * spec.value_dim * spec.state_dtype.itemsize
        values, decays = spec.num_value_heads * spec.value_dim, math.prod(spec.decay_dims)
        entry = 4 * (spec.num_key_heads * spec.key_dim + values + decays)
        token = (2 * spec.conv_channels + values) * spec.dtype.itemsize + 4 * (decays + spec.num_value_heads) + entry
        folds = sum(replay + self.queries > spec.journal for replay in replays)
        return (len(replays) + folds) * state + sum(replays) * entry + len(replays) * self.queries * token

    def _layer(self, replays: list[int]) -> Layer:
        spec, rows, device = self.spec, self.num_reqs, self.device
        (cache,) = get_state("triton_state").allocate_state(spec, 1, rows, device)
        for part in (cache.state, cache.conv, cache.update):
            part.normal_()
        cache.key.normal_().div_(spec.key_dim**0.5)
        cache.decay.uniform_(-0.5, 0.0)
        replay = torch.tensor(replays, dtype=torch.int32, device=device)
        context = torch.full_like(replay, _CONTEXT)
        cache.lengths.base.copy_(context - replay)
        cache.lengths.held.copy_(replay)
        ours = self._arguments(cache)
        slots = ours.slots.long()
        state, window = get_state("triton_state").read(cache, slots, context.long())
        conv, key = torch.zeros_like(cache.conv), torch.zeros_like(cache.key)
        conv[slots, : window.shape[1]] = window
        peers = ours._replace(conv=conv, key=key, base=context, held=torch.zeros_like(replay), may_fold=False)
        return Layer(ours, peers, state[:, None].repeat(1, 1 + self.queries, 1, 1, 1))

    def _arguments(self, cache: StateCache) -> StateStep:
        spec, rows, tokens, device = self.spec, self.num_reqs, self.num_reqs * self.queries, self.device
        limit = _CONTEXT + self.queries
        tables, _ = shuffled_tables(limit, rows, limit, device)
        buffers = BatchBuffers(tables, max_tokens=tokens)
        buffers.load([self.queries] * rows, [limit] * rows)
        view = buffers.view(0, num_reqs=rows, num_tokens=tokens, max_query_len=self.queries)
        builder = StateBuilder(spec, device, max_reqs=rows, max_tokens=tokens, max_seq_len=limit)
        skips, beta = spec.recurrence.rule.skips, torch.rand(tokens, spec.num_value_heads, device=device)
        inputs = StateInputs(
            torch.randn(tokens, spec.conv_channels, device=device).to(spec.dtype),
            # As Mamba2's, a step size times a rate.
            -beta if skips else -torch.rand(tokens, *spec.decay_dims, device=device),
            beta,
            torch.randn(spec.conv_channels, spec.conv_width, device=device).to(spec.dtype),
            skip=torch.randn(spec.num_value_heads, device=device) if skips else None,
        )
        return StateStep.of(inputs, cache, builder.build(view), spec.recurrence)


def recurrent_state_rows(bench: Bench) -> Iterator[BenchRow]:
    """Yield a row of our step at every shape, and one of each peer that is available."""
    for drafted, num_reqs, layer in product(*(_SHAPES if bench.on_cuda else _SHAPES_ON_CPU)):
        spec = replace(layer, journal=JOURNAL_STEPS * (1 + drafted))
        with bench.noting(CASE, at=f"[{spec.describe()}], {num_reqs} requests"):
            yield from comparison_rows(bench, TimedStep(spec, 1 + drafted, num_reqs, bench.device))


def comparison_rows(bench: Bench, step: TimedStep) -> Iterator[BenchRow]:
    """Yield our row, with its time over the best peer's, and the peers' rows."""
    at, peers = f"[{step.spec.describe()}], {step.queries} tokens of {step.num_reqs} requests", []
    expected = our_step(step.layers[0]).float()
    ours = _row(bench, step, _OURS, our_step)
    makers: dict[str, Callable[[list[Layer]], Call]]
    makers = {f"columns {columns}x{warps}": partial(columns_by, columns, warps) for columns, warps in TILES}
    for name, make in {**makers, "vllm": vllm_by}.items():
        with bench.noting(f"{CASE}: {name} (peer)", at=at):
            call = make(step.layers)
            difference = float((call(step.layers[0]).float() - expected).norm() / expected.norm())
            if not difference < _ROUNDING:
                bench.miss(f"{CASE}: {name} (peer) at {at}", f"differs from our result by {difference:.1%}")
                continue
            row = _row(bench, step, name, call)
            peers.append({**row, "peer": True, "peer_difference": round(difference, 5)})
    if bench.on_cuda:
        best = min((peer["gpu_us"]["p50"] for peer in peers), default=None)
        ours |= {"peer_ratio": best and round(ours["gpu_us"]["p50"] / best, 3), "floor_counts": _FLOOR}
        ours |= {"floor_us": bench.floor_us(step.moved_bytes)}
    yield with_limits(ours, TimingLimit("peer_ratio", 1.0))
    yield from peers


def our_step(layer: Layer) -> torch.Tensor:
    return state_step(*layer.ours)


def columns_by(block_v: int, num_warps: int, layers: list[Layer]) -> Call:
    """Return the peer with these tiles, after our own convolution."""

    def call(layer: Layer) -> torch.Tensor:
        step, subtracts = layer.peers, Recurrence(layer.peers.recurrence).rule.subtracts
        given = ColumnStates(
            layer.convolved(), step.decay, step.beta, step.skip, layer.columns, subtracts, step.key.shape[2], block_v,
            num_warps,
        )  # fmt: skip
        return column_states(*given)

    return call


def vllm_by(layers: list[Layer]) -> Call:
    """Return vLLM's fused recurrent kernel over states of its own layout, and over tokens that are convolved before.

    Raises NoBackend for a decay per channel.
    """
    if not Recurrence(layers[0].ours.recurrence).rule.subtracts:
        return _vllm_mamba2_by(layers)
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
        fused_recurrent_gated_delta_rule_fwd,
    )

    if layers[0].ours.decay.dim() == 3:
        raise NoBackend("its kernel of columns has one decay per value head")

    def arguments_of(layer: Layer) -> dict[str, Any]:
        *qkv, given = _vllm_arguments(layer)
        tokens = dict(zip("qkv", (part[None] for part in qkv), strict=True))
        scalars = {"g": layer.peers.decay[None], "beta": layer.peers.beta[None], "scale": 1.0}
        return {**tokens, **scalars, "initial_state": given.pop("state"), **given}

    arguments = {id(layer): arguments_of(layer) for layer in layers}
    return lambda layer: fused_recurrent_gated_delta_rule_fwd(**arguments[id(layer)])[0][0]


def _vllm_mamba2_by(layers: list[Layer]) -> Call:
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    arguments = {id(layer): _mamba2_arguments(layer) for layer in layers}

    def call(layer: Layer) -> torch.Tensor:
        given = arguments[id(layer)]
        selective_state_update(**given)
        out: torch.Tensor = given["out"]
        return out

    return call


def _mamba2_arguments(layer: Layer) -> dict[str, Any]:
    step, (_, _, heads, key_dim, value_dim) = layer.peers, layer.columns.shape
    assert step.skip is not None
    c, b, x, given = _vllm_arguments(layer)
    rate, indices = step.decay[0] / step.beta[0], given.pop("ssm_state_indices")
    # Views with strides of 0 tell it that a head has one step and one rate; the bias is 0.
    return {
        **given,
        **{"x": x, "B": b, "C": c, "D": step.skip[:, None].expand(heads, value_dim), "out": torch.empty_like(x)},
        "A": rate[:, None, None].expand(heads, value_dim, key_dim),
        "dt": step.beta[..., None].expand(x.shape),
        "dt_bias": torch.zeros(heads, 1, device=x.device).expand(heads, value_dim),
        "state_batch_indices": indices,
    }


def _vllm_arguments(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return q, k and v [R * Q, heads, dim], and where both of its kernels find their states."""
    step, (rows, columns, *_) = layer.peers, layer.columns.shape
    queries, (heads, key_dim), value_dim = columns - 1, step.key.shape[2:], layer.columns.shape[4]
    keys, device = heads * key_dim, step.x.device
    q, k, v = layer.convolved().to(step.x.dtype).split([keys, keys, step.x.shape[1] - 2 * keys], -1)
    q, k, v = (part.unflatten(-1, (-1, dim)).contiguous() for part, dim in ((q, key_dim), (k, key_dim), (v, value_dim)))
    # Its states have the key's dim last; index 0 means none.
    states = torch.zeros(1 + rows * queries, *layer.columns.shape[2:], device=device).transpose(-1, -2).contiguous()
    states[1::queries] = layer.columns[:, 0].transpose(-1, -2)
    return (
        q,
        k,
        v,
        {
            "state": states,
            "cu_seqlens": step.query_start_loc,
            "ssm_state_indices": torch.arange(1, 1 + rows * queries, device=device).view(rows, queries).int(),
            "num_accepted_tokens": torch.ones(rows, dtype=torch.int32, device=device),
        },
    )


def _row(bench: Bench, step: TimedStep, name: str, call: Call) -> BenchRow:
    if bench.on_cuda:
        times: BenchRow = {"gpu_us": time_in_turn(call, step.layers)}
    else:
        times = {"wall_us": time_call(lambda: call(step.layers[0]), step.device).wall_us}
    shape = {"num_reqs": step.num_reqs, "num_speculative_tokens": step.queries - 1, "context": _CONTEXT}
    return {"case": CASE, "backend": name, "spec": step.spec.describe(), **shape, **times}
