import math
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from attn_backends import get
from benchmarks import random_model
from benchmarks.cases import throughput
from benchmarks.cases.throughput import LLAMA3_8B, QWEN3_8B, ThroughputCase, rates_of, throughput_rows
from benchmarks.random_drafts import RANDOM_DRAFTS, _llama
from benchmarks.random_model import decoder_shapes, timed_load
from benchmarks.report import report_bytes
from benchmarks.rows import EMPTY, Bench
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.environment import environment
from spec_decode.files import parse_json
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.decoder import DecoderTarget
from spec_decode.paged import GraphMode
from spec_decode.testing.memory import read
from spec_decode.tools.timing_limit import verdict
from tests.factories import CPU, engine_config, make_config, make_pair

TINY = ThroughputCase(
    draft=replace(RANDOM_DRAFTS["llama3-8b-eagle"], config=_llama(64, 96, 4, 2, 64, 96)),
    num_layers=1,
    dtype=torch.float32,
    backends=("flash_attn3", "triton_paged"),
    num_reqs=(1, 2),
    prompt=20,
    output=20,
    warm_up_tokens=4,
    gains={2: -100.0},
)


@pytest.fixture(scope="module")
def timed():
    bench = Bench(CPU, None)
    return list(throughput_rows(bench, TINY)), bench


def rows_of(timed, part):
    return [row for row in timed[0] if row["case"] == f"throughput/{part}"]


def test_tiny_pair_runs_every_part(timed):
    assert not timed[1].stopped
    extend = [(r["num_reqs"], r["host_waits"], r["extend_in_graph"]) for r in rows_of(timed, "extend-graph")]
    assert extend == [(n, waits, on) for n in (1, 2) for waits in (False, True) for on in (False, True)]
    graphs = [(r["num_reqs"], r["host_waits"], r["one_graph"]) for r in rows_of(timed, "one-graph")]
    assert graphs == extend
    speculation = [(r["num_reqs"], r["num_speculative_tokens"]) for r in rows_of(timed, "speculation")]
    assert speculation == [(n, steps) for n in (1, 2) for steps in (0, 4)]


def test_acceptance_matches_requested_rate(timed):
    assert all(row["accepted"] == pytest.approx(1.0, abs=0.1) for row in rows_of(timed, "extend-graph"))
    kept = [row["accepted"] for row in rows_of(timed, "speculation")]
    assert kept[0] is kept[2] is None and all(2.0 <= found <= 3.0 for found in kept[1::2])


def test_gain_is_relative_to_previous_row(timed):
    assert all("gain_percent" in row for row in rows_of(timed, "one-graph")[1::2])
    rows = rows_of(timed, "extend-graph")
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        assert "gain_percent" not in off and "limits" not in off
        assert on["gain_percent"] == pytest.approx(100 * (on["per_user"] / off["per_user"] - 1), abs=0.1)
    assert [verdict(row.get("limits", ()))[0] for row in rows[1::2]] == ["", "", *["gain_percent >= -100"] * 2]
    assert all(verdict(row["limits"])[1] for row in rows[5::2])


def test_speculation_is_compared_with_plain_decoding(timed):
    plain, fast = rows_of(timed, "speculation")[:2]
    assert fast["plain_ratio"] == pytest.approx(fast["per_user"] / plain["per_user"], rel=0.01)
    assert (plain["draft_backend"], plain["strategy"], plain["extend_in_graph"]) == (None, None, None)
    assert (fast["draft_backend"], fast["strategy"], fast["extend_in_graph"]) == ("triton_paged", "full_loop", True)


def make_engine(pair, **options):
    options = {"strategy": Strategy.FULL_LOOP, "verification": "synthetic:1.0", **options}
    config = engine_config(num_speculative_tokens=2, max_num_seqs=2, max_model_len=52, **options)
    return Engine(*pair, get("torch_reference"), config)


@pytest.mark.parametrize("host_waits", [False, True])
def test_clock_covers_full_batch_and_empties_engine(host_waits, monkeypatch):
    """It starts when all requests have settled and stops when the first is complete."""
    engine = make_engine(TINY.models(CPU)[:2], graph_mode=GraphMode.NONE, strategy=None)
    # A second passes with every token, and with nothing else.
    clock = SimpleNamespace(perf_counter=lambda: float(engine.stats.new_tokens))
    monkeypatch.setattr(throughput, "time", clock)
    before = engine.pool.num_free
    rates = rates_of(engine, TINY.requests(2), 4, host_waits)
    # One token by the prompt and two a round: each has settled with 5, and 20 are a text.
    assert (rates.tokens, rates.seconds, rates.tokens_per_second) == (2 * (20 - 5), 2 * (20 - 5), 1.0)
    assert engine.pool.num_free == before and not engine.step()


@pytest.mark.parametrize(("case", "count"), [(LLAMA3_8B, 8_030_261_248), (QWEN3_8B, 8_190_735_360)])
def test_published_target_has_its_parameter_count(case, count):
    assert sum(map(math.prod, decoder_shapes(case.config).values())) == count


def test_target_is_loaded_as_llm_loads_it(timed):
    """From a folder, with all its layers; every row says what that took."""
    case = replace(TINY, architecture="Qwen3ForCausalLM", num_layers=2)
    target, _, load = case.models(CPU)
    assert type(target) is DecoderTarget and target.num_layers == 2
    assert load.bytes == sum(4 * math.prod(shape) for shape in decoder_shapes(case.config).values())
    assert load.seconds > 0 and load.device_peak is None
    assert load.host_peak is None or load.host_peak > load.bytes
    assert {row["load"].bytes for row in timed[0]} == {4 * (2 * 96 * 64 + 3 * 64 + 64 * (8 + 4) * 64 + 3 * 96 * 64)}
    bench = replace(timed[1], rows=[{**EMPTY, **timed[0][0]}], env=msgspec.to_builtins(environment(CPU)))
    assert parse_json(report_bytes(bench), "the report")["rows"][0]["load"]["bytes"] == timed[0][0]["load"].bytes


def test_peak_of_host_memory_is_that_of_loading():
    held = []

    def load():
        torch.zeros(1 << 26).add_(1)
        held.append(torch.ones(1 << 22))
        return torch.nn.Linear(4, 4)

    before = read(CPU).resident
    _, found = timed_load(load, CPU)
    assert found.bytes == 80
    assert found.host_peak is None or 7 << 25 <= found.host_peak - before < 5 << 26


def test_unserved_target_is_not_timed(monkeypatch):
    monkeypatch.setattr(random_model, "unserved", lambda _: "config.json has a field")
    with pytest.raises(CheckpointError, match=r"our layers do not compute the model to time: config.json has a field"):
        TINY.models(CPU)


@pytest.mark.parametrize(
    "strategy, with_step_0, later",
    [
        (Strategy.FULL_LOOP, "round", "loop"), (Strategy.DEVICE_LOOP, "round", "loop"),
        (Strategy.PER_STEP, "step", "step"),
    ],
)  # fmt: skip
def test_step_0_outside_graph_generates_same_tokens(strategy, with_step_0, later):
    pair, requests = make_pair(make_config(hidden_size=64, head_dim=64)), replace(TINY, output=9).requests(2)
    requests = [replace(request, prompt=[token % 20 for token in request.prompt]) for request in requests]
    options = {"strategy": strategy, "verification": "rejection", "one_graph": False}
    engines = [make_engine(pair, step_0_in_graph=on, **options) for on in (True, False)]
    inside, outside = ([g.token_ids for g in engine.generate(requests)] for engine in engines)
    assert inside == outside
    kinds = [{report.key.kind for report in engine.drafter.graphs.reports} for engine in engines]
    assert kinds == [{"step_0", with_step_0}, {later}]
