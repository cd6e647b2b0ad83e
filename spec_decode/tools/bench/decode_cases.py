"""Decode attention beside its peers: the same batch, the same caches, the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from attn_backends import NoBackend, Rejected, get
from builders import AttentionSpec
from spec_decode.tools.bench.measure import Quantiles
from spec_decode.tools.bench.peers import flashinfer_decode, flashinfer_mla
from spec_decode.tools.bench.rows import Bench, BenchLimit, BenchRow, held_to
from spec_decode.tools.bench.scene import Attend, DecodeScene, time_attention
from spec_decode.tools.bench.specs import GQA, MLA, PACKED, SPARSE

Way = Callable[[DecodeScene], Attend]


def by_backend(name: str) -> Way:
    """Attention by a registered backend. Raises a BackendError where it is absent or refuses the scene's spec."""

    def way(scene: DecodeScene) -> Attend:
        backend = get(name)
        verdict = backend.supports(scene.spec, scene.device)
        if isinstance(verdict, Rejected):
            raise NoBackend(f"refuses [{scene.spec.describe()}]: {'; '.join(verdict.reasons)}")
        return scene.attend_by(backend)

    return way


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """A backend of ours and those that it is held against; cold: in caches that are not in L2."""

    case: str
    backend: str
    peers: Mapping[str, Way]
    most: float
    """The most that its time may be of the best peer's."""
    cold: bool = True


_PAGED = Contest(
    case="paged-decode",
    backend="triton_paged",
    peers={"flash_attn3": by_backend("flash_attn3"), "flashinfer": flashinfer_decode},
    most=1.15,
)
_MLA = Contest(case="mla-decode", backend="triton_mla", peers={"flashinfer_mla": flashinfer_mla}, most=1.2)
_CORES = Contest(
    case="flashinfer-decode",
    backend="flashinfer",
    peers={name: by_backend(name) for name in ("flashinfer_tensor_cores", "flashinfer_cuda_cores")},
    most=1.15,
)
_FLASH_MLA = {"flashmla_sparse": by_backend("flashmla_sparse")}
# A window of 128 tokens is small enough to be in L2 still from the write before the attention.
_SPARSE = Contest(case="sparse-decode", backend="sparse_swa_mla", peers=_FLASH_MLA, most=1.0, cold=False)
_PACKED = replace(_SPARSE, most=0.8)


def paged_rows(bench: Bench) -> Iterator[BenchRow]:
    """triton_paged beside FlashAttention-3 and FlashInfer on tensor cores."""
    for num_reqs, context in product((1, 32), (1024, 8192)):
        yield from contest_rows(bench, _PAGED, GQA, num_reqs, context)


def flashinfer_rows(bench: Bench) -> Iterator[BenchRow]:
    """The kernel that flashinfer chooses beside each that it may choose, by query heads a KV head."""
    for group, num_reqs, context in product((1, 2, 4), (1, 32), (1024, 8192)):
        spec = replace(GQA, num_q_heads=group * GQA.num_kv_heads)
        yield from contest_rows(bench, _CORES, spec, num_reqs, context)


def mla_rows(bench: Bench) -> Iterator[BenchRow]:
    """triton_mla beside FlashInfer's latent attention."""
    for heads, num_reqs, context in product((16, 128), (1, 32), (1024, 8192)):
        yield from contest_rows(bench, _MLA, replace(MLA, num_q_heads=heads), num_reqs, context)


def sparse_rows(bench: Bench) -> Iterator[BenchRow]:
    """sparse_swa_mla beside FlashMLA, over packed fp8 and over bf16."""
    for spec, contest in ((PACKED, _PACKED), (SPARSE, _SPARSE)):
        for heads, num_reqs in product((64, 128), (1, 8, 32, 128)):
            yield from contest_rows(bench, contest, replace(spec, num_q_heads=heads), num_reqs, 1024)


def contest_rows(
    bench: Bench, contest: Contest, spec: AttentionSpec, num_reqs: int, context: int
) -> Iterator[BenchRow]:
    """A row of the backend, with its time over the best peer's, and one of each peer that is there."""
    at = f"[{spec.describe()}], {num_reqs} x {context}"
    with bench.noting(f"{contest.case}: {contest.backend}", at=at):
        scene = DecodeScene(spec, num_reqs, context, bench.device)
        attend, backend = by_backend(contest.backend)(scene), get(contest.backend)
        caches = scene.cold_caches(backend) if contest.cold else scene.warm_cache(backend)
        expected = attend(caches[0]).float()
        ours = time_attention(attend, caches)
        peers = []
        for name, way in contest.peers.items():
            with bench.noting(f"{contest.case}: {name} (peer)", at=at):
                attend = way(scene)
                difference = (attend(caches[0]).float() - expected).norm() / expected.norm()
                row = _row(bench, contest, scene, name, time_attention(attend, caches))
                peers.append({**row, "peer": True, "peer_difference": round(float(difference), 5)})
        best = min((peer["gpu_us"]["p50"] for peer in peers), default=None)
        row = _row(bench, contest, scene, contest.backend, ours)
        row["peer_ratio"] = best and round(ours["p50"] / best, 3)
        yield held_to(row, BenchLimit("peer_ratio", contest.most))
        yield from peers


def _row(bench: Bench, contest: Contest, scene: DecodeScene, name: str, gpu_us: Quantiles) -> BenchRow:
    floor = bench.floor_us(scene.kv_bytes) if contest.cold else None
    return {
        "case": contest.case,
        "backend": name,
        "spec": scene.spec.describe(),
        "num_reqs": scene.num_reqs,
        "context": scene.context,
        "gpu_us": gpu_us,
        "floor_us": floor,
        "share_of_bandwidth": floor and round(floor / gpu_us["p50"], 4),
    }
