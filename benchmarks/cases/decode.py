"""Attention of a few tokens per request next to its peers: the same batch, the same caches, the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from attn_backends import NoBackend, Rejected, get
from benchmarks.decode_fixture import AttentionCall, DecodeFixture
from benchmarks.measure import Quantiles, time_in_turn
from benchmarks.peers import flashinfer_decode, flashinfer_mla
from benchmarks.rows import SEEN, Bench, BenchRow, with_limits
from builders import AttentionSpec
from spec_decode.tools.specs import FP8_DS_MLA, GQA, MLA, SPARSE
from spec_decode.tools.timing_limit import TimingLimit

_ROUNDING = 0.05
"""Relative to the norm of our result; a peer that differs by more does other work, so its time is meaningless."""
AttentionMethod = Callable[[DecodeFixture], AttentionCall]


def by_backend(name: str) -> AttentionMethod:
    """Return attention by a registered backend. It raises a BackendError if that is absent or rejects the spec."""

    def method(fixture: DecodeFixture) -> AttentionCall:
        backend = get(name)
        verdict = backend.supports(fixture.spec, fixture.device)
        if isinstance(verdict, Rejected):
            raise NoBackend(f"rejects [{fixture.spec.describe()}]: {'; '.join(verdict.reasons)}")
        return fixture.attention_by(backend)

    return method


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerComparison:
    """One of our backends and its peers. max_ratio: of its time to the best peer's; cold: caches are not in L2; tokens:
    query tokens of each request."""

    case: str
    backend: str
    peers: Mapping[str, AttentionMethod]
    max_ratio: float
    cold: bool = True
    tokens: int = 1
    specs: tuple[AttentionSpec, ...] = ()
    num_reqs: tuple[int, ...] = (1, 32)
    contexts: tuple[int, ...] = (1024, 8192)


_SPARSE = PeerComparison(
    case="sparse-decode",
    backend="sparse_swa_mla",
    peers={"flashmla_sparse": by_backend("flashmla_sparse")},
    max_ratio=1.0,
    # A window of 128 tokens fits in L2, where it still is after the write before the attention.
    cold=False,
    specs=tuple(replace(SPARSE, num_q_heads=heads) for heads in (64, 128)),
    num_reqs=(1, 8, 32, 128),
    contexts=(1024,),
)
COMPARISONS = (
    replace(_SPARSE, specs=tuple(replace(FP8_DS_MLA, num_q_heads=heads) for heads in (64, 128)), max_ratio=0.8),
    _SPARSE,
    PeerComparison(
        case="mla-decode",
        backend="triton_mla",
        peers={"flashinfer_mla": flashinfer_mla, "flash_attn3_mla": by_backend("flash_attn3_mla")},
        max_ratio=1.2,
        specs=tuple(replace(MLA, num_q_heads=heads, page_size=32) for heads in (16, 128)),
    ),
    PeerComparison(
        case="mla-decode",
        backend="flashmla",
        peers={"flashinfer_mla": flashinfer_mla, "triton_mla": by_backend("triton_mla")},
        max_ratio=1.2,
        specs=tuple(replace(MLA, num_q_heads=heads) for heads in (16, 128)),
    ),
    PeerComparison(
        case="paged-decode",
        backend="triton_paged",
        peers={"flash_attn3": by_backend("flash_attn3"), "flashinfer": flashinfer_decode},
        max_ratio=1.15,
        specs=(GQA,),
    ),
    PeerComparison(
        case="paged-verify",
        backend="triton_paged",
        peers={"flash_attn3": by_backend("flash_attn3"), "flashinfer": by_backend("flashinfer")},
        max_ratio=1.03,
        tokens=8,
        specs=(
            GQA,
            replace(GQA, head_dim=64, value_dim=64, scale=None),
            replace(GQA, num_q_heads=16, num_kv_heads=4, head_dim=256, value_dim=256, scale=None),
            # A fourth of a model with 8 KV heads.
            replace(GQA, num_q_heads=16, num_kv_heads=2),
        ),
        num_reqs=(1, 8),
        contexts=(1024, 8192, 32768, 98304),
    ),
    PeerComparison(
        case="flashinfer-decode",
        backend="flashinfer",
        peers={name: by_backend(name) for name in ("flashinfer_tensor_cores", "flashinfer_cuda_cores")},
        max_ratio=1.15,
        specs=tuple(replace(GQA, num_q_heads=group * GQA.num_kv_heads) for group in (1, 2, 4)),
    ),
)


def decode_rows(bench: Bench, case: str) -> Iterator[BenchRow]:
    """Yield every comparison of the case at each of its specs and batch sizes."""
    for comparison in COMPARISONS:
        if comparison.case == case:
            for spec, num_reqs, context in product(comparison.specs, comparison.num_reqs, comparison.contexts):
                yield from comparison_rows(bench, comparison, spec, num_reqs, context)


def comparison_rows(
    bench: Bench, comparison: PeerComparison, spec: AttentionSpec, num_reqs: int, context: int
) -> Iterator[BenchRow]:
    """Yield a row of the backend, with its time over the best peer's, and one of each available peer."""
    at = f"[{spec.describe()}], {num_reqs} x {context}"
    with bench.noting(f"{comparison.case}: {comparison.backend}", at=at):
        fixture = DecodeFixture(spec, num_reqs, context, bench.device, tokens=comparison.tokens)
        attend, backend = by_backend(comparison.backend)(fixture), get(comparison.backend)
        caches = fixture.caches(backend, cold=comparison.cold)
        expected = attend(caches[0]).float()
        ours = time_in_turn(attend, caches)
        peers = []
        for name, method in comparison.peers.items():
            with bench.noting(f"{comparison.case}: {name} (peer)", at=at):
                attend = method(fixture)
                difference = float((attend(caches[0]).float() - expected).norm() / expected.norm())
                if not difference < _ROUNDING:
                    bench.miss(
                        f"{comparison.case}: {name} (peer) at {at}", f"differs from our result by {difference:.1%}"
                    )
                    continue
                row = _row(bench, comparison, fixture, name, time_in_turn(attend, caches))
                peers.append({**row, "peer": True, "peer_difference": round(difference, 5)})
        best = min((peer["gpu_us"]["p50"] for peer in peers), default=None)
        row = _row(bench, comparison, fixture, comparison.backend, ours)
        row["peer_ratio"] = best and round(ours["p50"] / best, 3)
        yield with_limits(row, TimingLimit("peer_ratio", comparison.max_ratio))
        yield from peers


def _row(bench: Bench, comparison: PeerComparison, fixture: DecodeFixture, name: str, gpu_us: Quantiles) -> BenchRow:
    floor = bench.floor_us(fixture.kv_bytes) if comparison.cold else None
    share = floor and round(floor / gpu_us["p50"], 4)
    labels = fixture.labels(comparison.case, name)
    return {**labels, "gpu_us": gpu_us, "floor_us": floor, "floor_counts": floor and SEEN, "share_of_bandwidth": share}
