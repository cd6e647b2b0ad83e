from dataclasses import replace

import msgspec
import pytest
import torch

import benchmarks as benches
from attn_backends import get
from benchmarks import decode_fixture, measure, peers
from benchmarks.cases import advance, backend_rounds, decode
from benchmarks.cases.decode import PeerComparison, by_backend, comparison_rows
from benchmarks.decode_fixture import DecodeFixture
from benchmarks.measure import DeviceRates
from benchmarks.report import read_report, report_bytes
from benchmarks.rows import STOPPED, Bench, with_limits
from builders import BatchError, advance_state
from spec_decode.files import parse_json
from spec_decode.graphs.dispatch_mode import PlainDispatchMode
from spec_decode.matrix.sources import Sources, TimingReport
from spec_decode.tools.specs import MLA
from spec_decode.tools.timing_limit import TimingLimit, verdict
from tests.factories import CPU, make_spec

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
SPEC = make_spec(num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)


def at(p50):
    return {"p20": p50, "p50": float(p50), "p80": p50}


@pytest.fixture
def bench():
    """Of a device, whose floors are known."""
    return Bench(CPU, DeviceRates(1000.0, 1.0))


@pytest.fixture
def timed(monkeypatch):
    """The medians that timing gives, in turn; each call is made once."""
    medians = []

    def time_in_turn(attend, caches):
        attend(caches[0])
        return at(medians.pop(0))

    monkeypatch.setattr(decode, "time_in_turn", time_in_turn)
    monkeypatch.setattr(decode_fixture, "COLD_BYTES", 1)
    return medians


def comparison(**peers):
    return PeerComparison(case="comparison", backend="triton_paged", peers=peers, max_ratio=1.5)


US, RATIO = TimingLimit("gpu_us", 3), TimingLimit("host_ratio", 10, at_least=True)
TWO = TimingLimit("a", 1), TimingLimit("b", 1)


@pytest.mark.parametrize(
    ("row", "limits", "verdict_text", "met"),
    [
        ({"gpu_us": 3.0}, [US], "gpu_us <= 3", True),
        ({"gpu_us": at(3)}, [US], "gpu_us <= 3", True),
        ({"gpu_us": {"p20": 1, "p50": 3.1, "p80": 4}}, [US], "gpu_us <= 3", False),
        ({"gpu_us": None}, [US], "gpu_us <= 3", None),
        ({}, [US], "gpu_us <= 3", None),
        ({"host_ratio": 10}, [RATIO], "host_ratio >= 10", True),
        ({"host_ratio": 9.9}, [RATIO], "host_ratio >= 10", False),
        ({"a": 1, "b": 2}, TWO, "a <= 1 and b <= 1", False),
        ({"a": 1}, TWO, "a <= 1 and b <= 1", None),
        ({"b": 2}, TWO, "a <= 1 and b <= 1", False),
    ],
)
def test_limit_applies_to_median_or_stays_open(row, limits, verdict_text, met):
    assert verdict(with_limits(row, *limits)["limits"]) == (verdict_text, met)


def test_row_is_compared_with_its_best_peer(bench, timed):
    timed += [3, 4, 2]
    peers = {"reference": by_backend("torch_reference"), "paged": by_backend("triton_paged")}
    ours, *others = comparison_rows(bench, comparison(**peers), SPEC, 2, 40)
    assert (ours["backend"], ours["peer_ratio"], verdict(ours["limits"])[1]) == ("triton_paged", 1.5, True)
    assert [(row["backend"], row["peer"]) for row in others] == [("reference", True), ("paged", True)]
    assert all(row["peer_difference"] < 1e-5 for row in others) and not bench.missing


@pytest.mark.parametrize(("cold", "floor"), [(True, (2 * 40 * 2 * 2 * 64 * 4 / 1000, 0.9990)), (False, (None, None))])
def test_cold_cache_floor_is_bytes_read(bench, timed, cold, floor):
    timed += [82]
    [row] = comparison_rows(bench, replace(comparison(), cold=cold), SPEC, 2, 40)
    assert (row["floor_us"], row["share_of_bandwidth"]) == floor


def test_verification_has_several_tokens(bench, timed):
    timed += [2.0, 1.0]
    verify = replace(comparison(peer=by_backend("torch_reference")), tokens=3)
    ours, peer = comparison_rows(bench, verify, SPEC, 2, 40)
    assert (ours["num_tokens"], ours["peer_ratio"], peer["num_tokens"]) == (3, 2.0, 3)


@pytest.mark.parametrize(("value", "off"), [(0.0, "100.0%"), (float("nan"), "nan%")])
def test_peer_with_other_result_is_noted_not_compared(bench, timed, value, off):
    timed += [3, 1]
    other = torch.full((1, SPEC.num_q_heads, SPEC.out_dim), value)
    peers = {"other": lambda fixture: lambda cache: other, "own": by_backend("torch_reference")}
    ours, peer = comparison_rows(bench, comparison(**peers), SPEC, 1, 16)
    assert (peer["backend"], ours["peer_ratio"]) == ("own", 3.0)
    [note] = bench.missing
    assert note.startswith("comparison: other (peer) at [") and note.endswith(f": differs from our result by {off}")


@pytest.fixture
def counted(monkeypatch):
    """Kernels are ops here, and time is 1 us each."""

    class Ops(PlainDispatchMode):
        count = 0

        def dispatch(self, op, args, kwargs):
            self.count += 1
            return op(*args, **kwargs)

    def kernels_in(call):
        with Ops() as ops:
            call()
        return ops.count

    monkeypatch.setattr(advance, "kernels_in", kernels_in)
    monkeypatch.setattr(advance, "time_kernels", lambda launch: at(kernels_in(launch)))


@pytest.fixture
def advances(bench, counted):
    return {(row["backend"], row["spec"], row["num_reqs"]): row for row in advance.advance_rows(bench) if "spec" in row}


def test_advance_of_views_launches_no_kernel(advances):
    rows = [row for (backend, *_), row in advances.items() if backend in ("triton_paged", "triton_mla")]
    assert len(rows) == 4
    for row in rows:
        assert (row["kernels_per_step"], row["gpu_us"]) == (0, None)
        assert verdict(row["limits"]) == ("kernels_per_step <= 1", True)


def test_window_lists_advance_with_one_kernel(advances):
    rows = [row for (backend, *_), row in advances.items() if backend == "sparse_swa_mla"]
    assert len(rows) == 4 and {row["kernels_per_step"] for row in rows} == {1}
    assert {verdict(row["limits"]) for row in rows} == {("kernels_per_step <= 1 and gpu_us <= 3", True)}


@pytest.mark.parametrize("context", [32, 41])
def test_flashinfer_decode_matches_reference(flashinfer, context):
    fixture = DecodeFixture(replace(SPEC, dtype=torch.bfloat16, kv_dtype=None), 3, context, CPU)
    [cache] = fixture.caches(get("torch_reference"), cold=False)
    expected = fixture.attention_by(get("torch_reference"))(cache)
    torch.testing.assert_close(peers.flashinfer_decode(fixture)(cache), expected, rtol=0.02, atol=0.02)


def test_flashinfer_mla_matches_reference(flashinfer):
    fixture = DecodeFixture(replace(MLA, dtype=torch.float32, kv_dtype=None), 2, 100, CPU)
    [cache] = fixture.caches(get("torch_reference"), cold=False)
    expected = fixture.attention_by(get("torch_reference"))(cache)
    torch.testing.assert_close(peers.flashinfer_mla(fixture)(cache), expected)


def planned(backend, num_reqs=2, context=250, horizon=7):
    fixture = DecodeFixture(replace(SPEC, dtype=torch.bfloat16, kv_dtype=None), num_reqs, context, CPU, horizon=horizon)
    return fixture, backend, fixture.builder(backend)


def test_horizon_plan_stays_right_with_last_page_len(flashinfer):
    fixture, backend, builder = planned(flashinfer.FlashInferHorizon())
    metadata = builder.build(fixture.batch)
    plan, plans = metadata.plan.clone(), len(metadata.launch.wrapper.plans)
    [cache] = fixture.caches(backend, cold=False)
    for _ in range(7):
        advance_state(fixture.buffers, fixture.num_reqs)
        builder.advance(metadata)
        expected = fixture.attention_by(get("torch_reference"))(cache)
        out = backend.forward(fixture.query, cache, metadata, spec=fixture.spec)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert torch.equal(metadata.plan, plan) and len(metadata.launch.wrapper.plans) == plans


@pytest.fixture(scope="module")
def on_cpu():
    """All that the suite `backends` can time on a CPU, each once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_WARMUP", 0)
        patch.setattr(measure, "_REPEATS", 1)
        cases = [replace(case, num_speculative_tokens=(2,), context=20) for case in backend_rounds._CASES_ON_CPU]
        patch.setattr(backend_rounds, "_CASES_ON_CPU", cases)
        return benches.run(device=CPU, cases=["backends"], command="bench backends")


@NO_CUDA
def test_tiny_rounds_on_cpu_have_no_limits(on_cpu):
    assert {(row["backend"], row["case"]) for row in on_cpu.rows} >= {
        (name, case)
        for name in ("torch_reference", "triton_paged", "triton_mla", "sparse_swa_mla")
        for case in ("round", "round/steps")
    }
    assert all(row["gpu_us"] is None and not row["limits"] and row["host_us"]["p50"] > 0 for row in on_cpu.rows)
    assert not any(row["floor_us"] or row["floor_counts"] for row in on_cpu.rows)
    assert any(note.startswith("round: cpu emulates graphs") for note in on_cpu.missing)


@NO_CUDA
def test_matrix_reads_the_report(on_cpu, tmp_path):
    path = tmp_path / "bench-backends.json"
    path.write_bytes(report_bytes(on_cpu))
    timings = Sources.read([path]).timings
    assert [(timing.case, timing.backend) for timing in timings] == [(r["case"], r["backend"]) for r in on_cpu.rows]
    assert {timing.title for timing in timings} == {"A whole draft round", "Steps 1 to K-1 of a draft round"}
    assert {timing.command for timing in timings} == {"bench backends"} and not any(t.changed for t in timings)
    assert [t.host_us.p50 for t in timings] == [pytest.approx(r["host_us"]["p50"], rel=1e-4) for r in on_cpu.rows]


@NO_CUDA
def test_row_sources_are_its_case_and_backend(on_cpu):
    sources = msgspec.convert(parse_json(report_bytes(on_cpu), "rows"), TimingReport).sources
    names = [f"{package}.{name}" for package, modules in sources.modules.items() for name in modules]
    behind = {names[i] for i in sources.parts["round"]}
    assert {"benchmarks.cases.backend_rounds", "attn_backends.triton_paged", "builders.paged"} <= behind
    assert "benchmarks.cases.sampling" not in behind


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


@NO_CUDA
def test_report_round_trips_the_run(on_cpu, tmp_path):
    rows = [with_limits(row, TimingLimit("host_us", 1)) for row in on_cpu.rows]
    limited = replace(on_cpu, rows=rows, missing=[*on_cpu.missing], stopped=[])
    limited.stopped.append(limited.miss("round", f"{STOPPED}RuntimeError: no memory"))
    path = tmp_path / "rows.json"
    path.write_bytes(report_bytes(limited))
    again = read_report(path, CPU)
    assert (again.command, again.stopped) == (limited.command, limited.stopped)
    assert again.env["date"] == limited.env["date"]
    for found, row in zip(again.rows, limited.rows, strict=True):
        has = {name: rounded(value) for name, value in row.items() if value is not None}
        assert {name: value for name, value in found.items() if value is not None} == has
    assert not read_report(tmp_path / "absent.json", CPU).rows


def test_run_without_rows_raises_with_reasons(monkeypatch):
    def nothing(bench):
        bench.miss("round/this", "is absent")
        return iter(())

    monkeypatch.setitem(benches._ROWS, "round", ("", nothing))
    with pytest.raises(BatchError, match="round/this: is absent"):
        benches.run(device=CPU, cases=["round"])


def test_failing_case_leaves_other_rows(monkeypatch):
    def rows(bench):
        yield {"case": "good"}
        raise RuntimeError("out of memory")

    monkeypatch.setitem(benches._ROWS, "round", ("", rows))
    timings = benches.run(device=CPU, cases=["round"])
    assert [row["case"] for row in timings.rows] == ["good"]
    assert timings.stopped == ["round: stopped by RuntimeError: out of memory"]
