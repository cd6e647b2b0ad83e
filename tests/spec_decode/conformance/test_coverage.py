"""The columns that checks cover, and the kit's record of a backend's claims."""

from dataclasses import replace

import pytest
import torch

from attn_backends import Feature
from attn_backends.torch_reference import TorchReference
from builders import AdvanceLevel, AdvanceSupport, AttentionSpec, ReferenceBuilder
from spec_decode.conformance import iter_checks
from spec_decode.conformance.claims import claims_of
from spec_decode.conformance.coverage import (
    DECLARED,
    EVERYTHING,
    column,
    every_strategy,
    one_strategy,
    only,
    with_case,
)
from spec_decode.conformance.runner import check_backend, check_list
from spec_decode.drafter import Strategy
from spec_decode.testing.batches import DECODE, RAGGED, VERIFY, Case
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.subject import Subject

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=4, head_dim=64, page_size=16)


class Rebuilt(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.REBUILD, "for the test")


class Limited(TorchReference):
    name = "limited"
    builder = Rebuilt
    capabilities = replace(TorchReference.capabilities, features=frozenset({Feature.GQA}), kv_dtypes=())


class Elsewhere(TorchReference):
    capabilities = replace(TorchReference.capabilities, devices=("cuda",))


def columns(covers, value: object = None, backend: TorchReference | None = None) -> set[str]:
    return set(covers(Subject(backend or TorchReference(), CPU), value))


def case(batch=DECODE, **changes) -> Case:
    return Case(replace(SPEC, **changes), batch)


def claims(backend: TorchReference, *tags: str):
    return claims_of(Subject(backend, CPU), tags)


@pytest.mark.parametrize(
    ("batch", "modes"),
    [(DECODE, {"decode"}), (VERIFY, {"verify"}), (RAGGED, {"prefill", "extend", "decode"})],
)
def test_batch_covers_modes_of_its_requests(batch, modes):
    found = columns(with_case(), case(batch))
    assert {column for column in found if column.startswith("mode:")} == {f"mode:{mode}" for mode in modes}


@pytest.mark.parametrize(
    ("changes", "tag"),
    [
        ({"page_size": 128}, "page:128"),
        ({"head_dim": 80, "value_dim": 80}, "dim:80"),
        ({"dtype": torch.float16, "kv_dtype": torch.float16}, "dtype:float16"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv:float8_e4m3fn"),
        ({"kv_dtype": torch.float32}, "kv:mixed"),
        ({"sliding_window": 8}, "feature:sliding_window"),
        ({"sinks": True}, "feature:sinks"),
        ({"soft_cap": 1.0}, "feature:soft_cap"),
        ({"num_kv_heads": 1}, "feature:gqa"),
        ({"value_dim": 32}, "feature:value_dim"),
    ],
)
def test_spec_covers_features_it_uses(changes, tag):
    assert tag in columns(with_case(), case(**changes)) and tag not in columns(with_case(), case())


def declared(family: str) -> dict[str, set[str]]:
    """The columns that are the same in every case of each check of a family, without those of its cases."""
    found: dict[str, set[str]] = {}
    for check in iter_checks("torch_reference", device=CPU):
        if check.family == family:
            own = set(check.covers) - columns(with_case(), check.value)
            assert found.setdefault(check.name, own) == own
    return found


BESIDE_ITS_CASE = {
    "contract": {"contract:declared"},
    "refusal": {"contract:refusals"},
    "poison": {"contract:memory"},
    "graph": {"graph:capture", "graph:advance"},
    "builder": {"graph:advance"},
    "numerics": set(),
}
OTHERWISE = {
    **{
        f"builder.{name}": set()
        for name in (
            "build_leaves_the_batch_alone",
            "build_reuses_its_addresses",
            "builds_go_on",
            "build_reads_no_device",
            "host_lengths_may_be_bounds",
            "rounds_keep_no_memory",
        )
    },
    "numerics.fused_rope_write_stores_the_same": {"fused_write:rope"},
    "numerics.fused_latent_write_stores_the_same": {"fused_write:kv_a_norm_rope"},
}


@pytest.mark.parametrize("family", BESIDE_ITS_CASE)
def test_checks_of_a_family_cover_same_columns(family):
    found = declared(family)
    assert found and found == {name: OTHERWISE.get(name, BESIDE_ITS_CASE[family]) for name in found}
    assert {name for name in OTHERWISE if name.startswith(f"{family}.")} <= found.keys()


def test_claim_checks_cover_no_spec_columns():
    assert columns(only(DECLARED), case()) == {"contract:declared"}


def test_backend_refusing_every_case_covers_every_column():
    class Refuses(TorchReference):
        def unsupported_reasons(self, spec, device):
            return ["serves nothing"]

    checks = [check for check in iter_checks(Refuses(), device=CPU) if check.name == "numerics.attention_is_right"]
    assert [(check.case, check.covers) for check in checks] == [("any", (EVERYTHING,))]


def test_drafter_case_covers_strategies_it_runs():
    assert columns(one_strategy, Strategy.EAGER) == {"strategy:eager"}
    assert len(columns(one_strategy, (4, 1))) == 1  # the strategy chosen
    every, limited = columns(every_strategy, (4, 1)), columns(every_strategy, (4, 1), Limited())
    assert {"strategy:full_loop", "strategy:per_step", "strategy:eager"} <= every
    assert every - limited >= {"strategy:full_loop"} and "strategy:per_step" in limited


def test_strategy_checks_cover_the_strategies():
    checks = {check.name: set(check.covers) for check in iter_checks("torch_reference", device=CPU)}
    every = columns(every_strategy)
    assert checks["drafter.strategies_agree"] == checks["drafter.requests_stop_on_their_own"] == every
    assert len(checks["drafter.steps_attend_to_the_logical_prefix"]) == 1


def test_every_check_of_a_backend_covers_something():
    planned = check_list("torch_reference", device=CPU).report
    assert [result.check for result in planned.results if not result.tags] == []
    assert {result.outcome for result in planned.results} == {Outcome.NOT_RUN}


def test_a_report_records_claims_contract_and_tags():
    report = check_backend("torch_reference", device=CPU, tags=["contract:declared"], report=True)
    assert report.contract == "1.3" and report.claims["feature:sinks"].claimed
    assert {tag for result in report.results for tag in result.tags} == {"contract:declared"}


def test_claims_come_from_capabilities_and_builder():
    yes, no = claims(TorchReference()), claims(Limited())
    for tag in ("feature:sinks", "kv:float8_e4m3fn", "strategy:full_loop", "graph:advance"):
        assert yes[tag].claimed and not no[tag].claimed, tag
    assert (no["graph:advance"].level, no["graph:advance"].reason) == ("rebuild", "for the test")


def test_backend_for_another_device_claims_nothing():
    found = claims(Elsewhere(), "page:64")
    assert list(found) == [EVERYTHING] and not found[EVERYTHING].claimed and "not on cpu" in found[EVERYTHING].reason


def test_unreadable_claim_does_not_count():
    odd = type("Odd", (ReferenceBuilder,), {"graph_support": "always"})
    claim = claims(type("OddBackend", (TorchReference,), {"builder": odd})())["graph:capture"]
    assert not claim.claimed and "cannot be read: ValueError" in claim.reason


def test_dtype_claim_notes_rounded_partials():
    able = replace(TorchReference.capabilities, rounds_partials=True)
    backend = type("Rounding", (TorchReference,), {"capabilities": able})()
    found = claims(backend, column("dtype", torch.bfloat16))[column("dtype", torch.bfloat16)]

    assert found.claimed and found.reason == "partial outputs of a split prefix are rounded to it and summed in it"
