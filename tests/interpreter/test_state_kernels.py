"""Each branch of the kernels of recurrent state has a mutant that a sample of its op kills, and their bench starts."""

import importlib.util
from pathlib import Path

import pytest
import torch

import tests.ops.state  # noqa: F401
from attn_backends.state_kernels import chain, convolution, matrix, move_entries, rows, tokens
from benchmarks import measure
from benchmarks.cases import recurrent_state
from benchmarks.rows import Bench
from builders import Recurrence
from builders.kernels.triton_runtime import torch_implementations
from tests.factories import CPU
from tests.ops.questions import check_op
from tests.ops.sample import TABLE
from tests.stand_in_modules import install_module

MODULES = {
    "rows": rows,
    "convolution": convolution,
    "chain": chain,
    "tokens": tokens,
    "matrix": matrix,
    "move": move_entries,
}
STEP, END, MOVE = "state_step", "end_state_step", "move_entries"
MUTANTS = [
    ("rows", STEP, "fold = fresh | (replay + q_len + reserve > JOURNAL)", "fold = fresh"),
    ("rows", STEP, "replay + q_len + reserve > JOURNAL", "replay + q_len > JOURNAL"),
    ("rows", STEP, "fits & (fold | (replay + q_len <= JOURNAL))", "fits"),
    ("rows", STEP, "fresh = runs & (context == 0)", "fresh = runs & (context < 0)"),
    ("rows", STEP, "(replay >= 0) & (replay <= held)", "replay >= 0"),
    ("rows", STEP, "(replay >= 0) & (replay <= held)", "replay <= held"),
    ("rows", STEP, "(seq_len > 0) & (seq_len <= max_seq_len)", "seq_len <= max_seq_len"),
    ("rows", STEP, "(seq_len > 0) & (seq_len <= max_seq_len)", "seq_len > 0"),
    ("rows", STEP, "(slot >= 0) & (slot < num_slots)", "slot < num_slots"),
    ("rows", STEP, "    if fold:\n", "    if fold & (replay < 0):\n"),
    ("rows", STEP, "(offs_t < count)", "(offs_t >= 0)"),
    ("rows", END, "tl.where(fold, 0, replay) + q_len", "replay + q_len"),
    ("rows", END, "tl.store(held_ptr + slot, tl.zeros_like(seq_len), mask=live)", "pass"),
    ("rows", END, "mask=live & fold", "mask=live"),
    ("rows", END, "mask=lost & inside", "mask=live & inside"),
    ("convolution", STEP, "from_window = mask_t & (place < 0) & (fresh == 0)", "from_window = mask_t & (place < 0)"),
    ("convolution", STEP, "rows = (replay + WIDTH - 1 - beyond)", "rows = (WIDTH - 1 - beyond)"),
    ("convolution", STEP, "ancestors = ancestors - last", "ancestors = ancestors"),
    ("convolution", STEP, "mask=mask_w & (fold | ABSORB)", "mask=mask_w & ABSORB"),
    ("convolution", STEP, "            end += q_len\n", "            end += 0\n"),
    ("convolution", STEP, "mask=mask_w & (end < 0) & (fresh == 0)", "mask=mask_w & (end < 0)"),
    ("convolution", STEP, "    if ACTIVATES:\n", "    if WIDTH > 0:\n"),
    ("convolution", STEP, "    if NORMALISES:\n", "    if WIDTH > 0:\n"),
    ("convolution", STEP, "(live == 0) & RETURNS", "(live < 0) & RETURNS"),
    ("convolution", STEP, "                DECAYS - at,\n", "                DECAYS,\n"),
    (
        "convolution",
        STEP,
        "replaced_decays_ptr + row.to(tl.int64) * (JOURNAL * DECAYS) + at",
        "replaced_decays_ptr + at",
    ),
    ("chain", STEP, "if live == 0:", "if live & (q_len < 0):"),
    ("chain", STEP, "mask=mask & (fresh == 0)", "mask=mask"),
    ("chain", STEP, "key_ptr = tl.where(fold, replaced", "key_ptr = tl.where(fold & (replay < 0), replaced"),
    ("chain", STEP, "decays_ptr = tl.where(fold, replaced", "decays_ptr = tl.where(fold & (replay < 0), replaced"),
    ("chain", STEP, "offs_k if PER_CHANNEL else offs_k * 0", "offs_k"),
    ("chain", STEP, "more = later < replay", "more = later < replay - 1"),
    ("chain", STEP, "state * tl.exp(bounded(g))[:, None]", "state"),
    ("chain", STEP, "    if fold:\n", "    if fresh:\n"),
    ("chain", STEP, "tl.where(fold, 0, replay)", "replay"),
    ("chain", STEP, "(q * decay)[:, None]", "q[:, None]"),
    ("chain", STEP, "(k * decay)[:, None]", "k[:, None]"),
    ("chain", STEP, "    if SUBTRACTS:\n", "    if HEADS > 0:\n"),
    ("chain", STEP, "u = beta * u", "pass"),
    ("chain", STEP, "state * decay[:, None]", "state"),
    ("chain", STEP, "o += tl.sum(q * k, 0) * u", "pass"),
    ("chain", STEP, "o += skip * v", "pass"),
    ("chain", STEP, "more = later < q_len", "more = later < q_len - 1"),
    ("tokens", STEP, "tl.where(seen, of_queries * decay, 0.0)", "tl.where(seen, of_queries, 0.0)"),
    ("tokens", STEP, "tl.where(seen, of_queries * decay, 0.0)", "of_queries * decay"),
    ("tokens", STEP, "tl.where(seen & (i[:, None] > i[None, :])", "tl.where((i[:, None] > i[None, :])"),
    ("tokens", STEP, "beta * of_keys * decay", "of_keys * decay"),
    ("tokens", STEP, "beta * of_keys * decay", "beta * of_keys"),
    ("tokens", STEP, "i[None, :], beta, 0.0)", "i[None, :], 1.0, 0.0)"),
    ("tokens", STEP, "solve -= tl.sum(", "solve -= 0.5 * tl.sum("),
    ("tokens", STEP, "tl.exp(between)", "tl.exp(sums - tl.trans(sums))"),
    ("matrix", STEP, "u = v * tl.load(beta_ptr + of_head, mask=mask_t, other=0.0)", "u = v"),
    ("matrix", STEP, "o += tl.load(skip_ptr + value_head) * v", "pass"),
    (
        "matrix",
        STEP,
        "tl.sum(tl.where(i[None, :] > i[:, None], tl.trans(g), 0.0), 1)[:, None]",
        "total[None, :] - tl.cumsum(g, 0)",
    ),
    ("matrix", STEP, "tl.exp(tl.load(sums_ptr + of_head, mask=mask_t, other=0.0))", "1.0"),
    ("tokens", STEP, "seen = seen & (on_path | (i[None, :] == i[:, None]))", "pass"),
    ("tokens", STEP, "tl.where(sees & (i > j), tl.sum(k * key, 1), 0.0)", "tl.where(i > j, tl.sum(k * key, 1), 0.0)"),
    ("rows", STEP, "tl.maximum(g, -100.0)", "g"),
    ("tokens", STEP, "beta * tl.sum(", "tl.sum("),
    ("matrix", STEP, "if live == 0:", "if live & (q_len < 0):"),
    ("matrix", STEP, "& mask_v & (fresh == 0)", "& mask_v"),
    ("matrix", STEP, "key_ptr = tl.where(fold, replaced", "key_ptr = tl.where(fold & (replay < 0), replaced"),
    ("matrix", STEP, "decays_ptr = tl.where(fold, replaced", "decays_ptr = tl.where(fold & (replay < 0), replaced"),
    ("matrix", STEP, "if fold & (not ABSORB)", "if fresh & (not ABSORB)"),
    ("matrix", STEP, "entry = (tl.where(fold, 0, replay) + i)", "entry = (replay + i)"),
    ("matrix", STEP, "tl.exp(later)", "tl.exp(later * 0)"),
    ("matrix", STEP, "states[at] * tl.exp(total)[:, None]", "states[at]"),
    (
        "matrix",
        STEP,
        "states = take_in(states, k_ptrs, g_ptrs, mask_t",
        "states = take_in(states, q_ptrs, g_ptrs, mask_t",
    ),
    ("move", MOVE, "(token > at + 1) & (token < q_len)", "token > at + 1"),
    ("move", MOVE, "source = first + token", "source = token"),
    ("move", MOVE, "(seq_len == tl.load(base_ptr + slot) + held)", "(seq_len > 0)"),
    ("move", MOVE, "window + source, window + target", "source, target"),
]


@pytest.mark.parametrize(("room", "op", "old", "new"), MUTANTS)
def test_mutant_is_killed(room, op, old, new, tmp_path, monkeypatch):
    source, made = Path(MODULES[room].__file__).read_text(), tmp_path / "mutant.py"
    assert source.count(old) == 1
    # An op can be defined only once.
    source = source[: source.rindex("\n\n\n")] if " = define_op(" in source else source
    made.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", made)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    functions = {name: value for name, value in vars(mutant).items() if type(value) is type(rows.plan_row)}
    for module in MODULES.values():
        for name in functions.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, functions[name])
    record = TABLE[f"attn_backends::{op}"]
    # What a kernel leaves unwritten is not 0 by chance.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert any(fails(record, sample) for sample in record.samples)
    finally:
        torch.use_deterministic_algorithms(False)


def fails(op, sample):
    try:
        check_op(op, sample, CPU)
    except Exception:
        return True
    return False


def fused_recurrent(q, k, v, g, beta, scale, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens):
    """vLLM's kernel by its definition, without sharing of key heads."""
    out, group = torch.empty_like(v), v.shape[2] // k.shape[2]
    q, k = (part[0].float().repeat_interleave(group, 1) for part in (q, k))
    for row, (indices, accepted) in enumerate(zip(ssm_state_indices, num_accepted_tokens, strict=True)):
        assert indices.min() > 0
        state = initial_state[indices[accepted - 1]]
        for at, token in enumerate(range(cu_seqlens[row], cu_seqlens[row + 1])):
            state = state * g[0, token].exp()[:, None, None]
            error = v[0, token].float() - torch.einsum("hvk,hk->hv", state, k[token])
            state = state + torch.einsum("h,hv,hk->hvk", beta[0, token], error, k[token])
            out[0, token] = torch.einsum("hvk,hk->hv", state, q[token] * scale)
            initial_state[indices[at]] = state
    return out, initial_state


def selective_state_update(
    state, x, dt, A, B, C, D, dt_bias, state_batch_indices, num_accepted_tokens, cu_seqlens, out
):  # fmt: skip
    """vLLM's kernel by its definition."""
    assert not any(part.stride(-1) for part in (dt, A, dt_bias))
    B, C = (part.float().repeat_interleave(x.shape[1] // part.shape[1], 1) for part in (B, C))
    for row, (indices, accepted) in enumerate(zip(state_batch_indices, num_accepted_tokens, strict=True)):
        own = state[indices[accepted - 1]]
        for at, token in enumerate(range(cu_seqlens[row], cu_seqlens[row + 1])):
            step = dt[token] + dt_bias
            own = own * (A * step[..., None]).exp() + (step * x[token].float())[..., None] * B[token][:, None]
            out[token] = torch.einsum("hvk,hk->hv", own, C[token]) + D * x[token]
            state[indices[at]] = own


def test_bench_starts_and_peers_agree(monkeypatch):
    monkeypatch.setattr(measure, "_WARMUP", 0)
    monkeypatch.setattr(measure, "_REPEATS", 1)
    monkeypatch.setattr(recurrent_state, "TILES", ((8, 1), (32, 4)))
    module = "vllm.third_party.flash_linear_attention.ops.fused_recurrent"
    install_module(monkeypatch, module, fused_recurrent_gated_delta_rule_fwd=fused_recurrent)
    module = "vllm.model_executor.layers.mamba.ops.mamba_ssm"
    install_module(monkeypatch, module, selective_state_update=selective_state_update)
    bench = Bench(CPU, None)
    rows = list(recurrent_state.recurrent_state_rows(bench))
    assert [row["backend"] for row in rows] == ["triton_state", "columns 8x1", "columns 32x4", "vllm"] * 2
    assert not bench.missing and all(row["wall_us"]["p50"] > 0 for row in rows)


def test_layers_of_the_bench_have_shuffled_slots():
    (_, (rows,), (spec, _)) = recurrent_state._SHAPES_ON_CPU
    layer = recurrent_state.TimedStep(recurrent_state.replace(spec, journal=8), 4, rows, CPU).layers[0]
    assert layer.ours.slots.tolist() != sorted(layer.ours.slots.tolist())


def test_columns_are_those_of_their_definition():
    (*_, (spec, _)) = recurrent_state._SHAPES_ON_CPU
    for changes in ({}, *({"recurrence": each} for each in (Recurrence.KDA, Recurrence.SSD))):
        layers = recurrent_state.TimedStep(recurrent_state.replace(spec, journal=8, **changes), 4, 2, CPU).layers * 2
        found, columns = recurrent_state.columns_by(16, 1, layers)(layers[0]), layers[0].columns.clone()
        with torch_implementations():
            torch.testing.assert_close(recurrent_state.columns_by(16, 1, layers)(layers[0]), found)
        torch.testing.assert_close(layers[0].columns, columns)
