"""Cases drawn from what a backend claims, and the claims that it does not serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends import AttentionBackend, Capabilities, Feature, Sizes, get
from attn_backends.torch_reference import TorchReference
from builders import AttentionKind, AttentionSpec
from spec_decode.conformance import check_backend, iter_checks
from spec_decode.conformance.cases import named_specs
from spec_decode.conformance.claimed_axes import spec_axes
from spec_decode.conformance.drawn_cases import STEPS, DrawnCases, drawn, drawn_from, unserved_claims
from spec_decode.testing.batches import Case
from spec_decode.testing.subject import Subject

CPU = torch.device("cpu")
BACKENDS = ("torch_reference", "triton_paged", "triton_mla", "sparse_swa_mla")


def draws(backend: AttentionBackend | str, seed: int = 0, device: torch.device = CPU) -> DrawnCases:
    with drawn_from(seed):
        return drawn(Subject(get(backend) if isinstance(backend, str) else backend, device))


def claiming(**changes: Any) -> AttentionBackend:
    able = replace(TorchReference.capabilities, **changes)
    return type("Claiming", (TorchReference,), {"capabilities": able, "name": "claiming"})()


def cases(backend: AttentionBackend | str) -> list[Case]:
    return [case for _, case in draws(backend).cases]


@pytest.mark.parametrize("name", BACKENDS)
def test_drawn_cases_are_accepted_and_cover_most_pairs(name: str) -> None:
    found = draws(name)
    assert all(get(name).supports(case.spec, CPU) for _, case in found.cases)
    assert found.covered > 0.93 * found.possible and len({name for name, _ in found.cases}) == 240


def test_seed_determines_drawn_cases() -> None:
    # One that may refuse more than it claims: backends of equal claims alone share their cases.
    own: dict[str, Any] = {"unsupported_reasons": lambda self, spec, device: []}
    first, again, other = (draws(type("Again", (TorchReference,), own)(), seed).cases for seed in (0, 0, 1))
    assert first is not again
    assert first == again and {case.spec for _, case in first} != {case.spec for _, case in other}
    assert first[7][0] == "s0-007" and other[7][0] == "s1-007"


def test_backends_of_equal_claims_share_their_cases() -> None:
    one, other, narrow = (draws(claiming(**changes)) for changes in ({}, {}, {"kinds": (AttentionKind.MHA,)}))
    assert one is other and one.cases != narrow.cases


def test_every_class_value_is_drawn() -> None:
    specs = [case.spec for case in cases("torch_reference")]
    axes = {axis.name: axis for axis in spec_axes(TorchReference.capabilities)}

    def values(name: str) -> set[Any]:
        return {value for each in axes[name].classes.values() for value in each}

    assert {spec.group_size for spec in specs} == values("group_size")
    assert {spec.page_size for spec in specs} == values("page_size")
    assert {spec.sliding_window for spec in specs} == values("window")
    assert {spec.kind for spec in specs} == {*AttentionKind}


def test_drawn_batches_vary_in_all_dimensions() -> None:
    found = cases("torch_reference")
    batches = [case.batch for case in found]
    assert max(len(batch.seq_lens) for batch in batches) > 256
    assert max(max(batch.seq_lens) for batch in batches) > 16_384
    assert any(batch.num_tokens == batch.rows and not batch.uniform for batch in batches)
    assert any(batch.tail for batch in batches) and any(any(batch.trees) for batch in batches)
    assert any(case.sick is not None for case in found) and {case.width for case in found} == {1, 2, 3}
    window = [case for case in found if (case.spec.sliding_window or 0) > 4096]
    assert any(max(case.batch.seq_lens) > case.spec.sliding_window for case in window if case.spec.sliding_window)
    for case in found:
        assert max(case.batch.seq_lens) + STEPS <= case.max_seq_len
        assert (case.other is not None) == case.batch.uniform
        assert case.other is None or case.other.num_tokens == case.batch.num_tokens


@pytest.mark.parametrize(
    ("changes", "drawn_of"),
    [
        ({"page_sizes": Sizes(minimum=16, maximum=48, multiple_of=16)}, {16, 32, 48}),
        ({"page_sizes": Sizes(among=(16, 40))}, {16, 40}),
        ({"page_sizes": Sizes(minimum=13, maximum=17)}, {13, 16, 17}),
    ],
)
def test_claim_bounds_are_drawn_and_nothing_beyond(changes: dict[str, Sizes], drawn_of: set[int]) -> None:
    assert {case.spec.page_size for case in cases(claiming(**changes))} == drawn_of


def test_unclaimed_feature_is_not_drawn() -> None:
    specs = [case.spec for case in cases(claiming(features=frozenset({Feature.GQA}), kinds=(AttentionKind.MHA,)))]
    assert {(spec.sliding_window, spec.soft_cap, spec.sinks, spec.tree, spec.causal) for spec in specs} == {
        (None, None, False, False, True)
    }
    assert all(spec.head_dim == spec.out_dim for spec in specs)


def test_refused_class_is_missed_and_fails_no_case() -> None:
    class NoCapsOverFp8(TorchReference):
        def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
            return ["caps need wider keys"] if spec.soft_cap and spec.cache_dtype.itemsize == 1 else []

    class NoGroupsOf5(TorchReference):
        def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
            return ["group_size must not be 5"] if spec.group_size == 5 else []

    assert ("group_size", "5") in draws(NoGroupsOf5()).missed
    assert {axis for axis, _ in draws(NoCapsOverFp8()).missed} <= {"length"}
    assert unserved_claims(Subject(NoGroupsOf5(), CPU)) == unserved_claims(Subject(NoCapsOverFp8(), CPU)) == []


@pytest.mark.parametrize("name", BACKENDS)
def test_the_backends_serve_all_that_they_claim(name: str) -> None:
    assert unserved_claims(Subject(get(name), CPU)) == []


def test_claim_always_refused_is_reported_with_reason() -> None:
    class Refuses(TorchReference):
        def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
            refused = spec.page_size == 32 or spec.head_dim == 80 or spec.tree
            return ["it is Saturday"] if refused else []

    found = unserved_claims(Subject(Refuses(), CPU))
    assert found == [f"{claim} (it is Saturday)" for claim in ("page_size 32", "head_dim 80", "tree")]


def test_drawn_case_repro_names_its_seed() -> None:
    with drawn_from(5):
        report = check_backend(
            "torch_reference", device=CPU, checks=["numerics.drawn_attention_is_right[[]s5-003]"], report=True
        )
    (result,) = report.results
    assert report.drawn is not None and report.drawn.seed == 5 and report.drawn.cases == 240
    assert report.repro(result.check, result.case) == (
        "attn-backends check torch_reference --device cpu --seed 5 --only 'numerics.drawn_attention_is_right*s5-003*'"
    )


def test_engine_builder_gets_no_drawn_case() -> None:
    subject = Subject(get("torch_reference"), CPU, engine="vllm 0.33")
    assert drawn(subject).cases == ()


def test_size_without_column_gets_no_tag() -> None:
    tags = {tag for check in iter_checks("torch_reference", device=CPU) for tag in check.covers}
    assert {"page:16", "page:256", "dim:96"} <= tags and not tags & {"page:48", "dim:104"}


def test_few_drawn_cases_need_new_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class ForEachPage(TorchReference):
        def compiled_for(self, spec: AttentionSpec) -> int:
            return spec.page_size

    monkeypatch.setattr(Capabilities, "_device_reasons", lambda self, device: [])
    subject = Subject(ForEachPage(), torch.device("cuda"))
    named = {spec.page_size for spec in named_specs(subject)}
    pages = {case.spec.page_size for _, case in drawn(subject).cases}
    assert len(pages - named) == 4 and len(pages & named) > 4
    assert len({case.spec.page_size for _, case in draws(ForEachPage()).cases} - named) > 4
