"""What the kit tags its results with, and what it records of a backend's claims."""

from dataclasses import replace

import pytest
import torch

from attn_backends import Feature
from attn_backends.torch_reference import TorchReference
from builders import AdvanceLevel, AdvanceSupport, AttentionSpec, ReferenceBuilder
from spec_decode.conformance.cases import DECODE, RAGGED, VERIFY, Case
from spec_decode.conformance.check import Check, Subject, Unsupported
from spec_decode.conformance.claims import claims_of
from spec_decode.conformance.report import EVERYTHING, Outcome
from spec_decode.conformance.runner import check_backend, plan
from spec_decode.conformance.tags import tags_of
from spec_decode.drafter.plan import Strategy

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=4, head_dim=64, page_size=16)


class Rebuilt(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.REBUILD, "for the test")


class Weak(TorchReference):
    name = "weak"
    builder = Rebuilt
    capabilities = replace(TorchReference.capabilities, features=frozenset({Feature.GQA}), kv_dtypes=())


class Elsewhere(TorchReference):
    capabilities = replace(TorchReference.capabilities, devices=("cuda",))


def tags(name: str, value: object = None, backend: TorchReference | None = None) -> set[str]:
    return set(tags_of(Subject(backend or TorchReference(), CPU), Check(name, "case", "contract", dict, value)))


def case(batch=DECODE, **changes) -> Case:
    return Case(replace(SPEC, **changes), batch)


def claims(backend: TorchReference, *asked: str):
    return claims_of(Subject(backend, CPU), asked)


@pytest.mark.parametrize(
    ("batch", "modes"),
    [(DECODE, {"decode"}), (VERIFY, {"verify"}), (RAGGED, {"prefill", "extend", "decode"})],
)
def test_a_batch_is_tagged_by_what_its_requests_do(batch, modes):
    found = tags("numerics.attention_is_right", case(batch))
    assert {tag for tag in found if tag.startswith("mode:")} == {f"mode:{mode}" for mode in modes}


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
def test_a_spec_is_tagged_by_what_it_asks_for(changes, tag):
    assert tag in tags("numerics.x", case(**changes)) and tag not in tags("numerics.x", case())


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("poison.x", "contract:memory"), ("graph.x", "graph:capture"), ("graph.x", "graph:advance"),
        ("builder.advance_x", "graph:advance"),
    ],
)  # fmt: skip
def test_a_check_is_tagged_by_its_name_beside_its_case(name, tag):
    assert {tag, "mode:decode"} <= tags(name, case())


@pytest.mark.parametrize(("family", "tag"), [("contract", "contract:declared"), ("refusal", "contract:refusals")])
def test_a_check_of_the_claims_or_refusals_is_no_evidence_for_its_spec(family, tag):
    assert tags(f"{family}.x", case()) == {tag}


def test_a_backend_that_refuses_every_case_is_refused_in_every_column():
    assert tags("numerics.x", Unsupported("no")) == {EVERYTHING}


def test_a_drafters_case_is_tagged_with_the_strategy_that_it_names():
    assert tags("drafter.strategies_agree", (4, 1, Strategy.EAGER)) == {"strategy:eager"}


def test_where_strategies_are_compared_all_that_run_are_tagged():
    every = tags("drafter.strategies_agree", (4, 1))
    weak = tags("drafter.strategies_agree", (4, 1), Weak())
    assert {"strategy:full_loop", "strategy:per_step", "strategy:eager"} <= every
    assert every - weak >= {"strategy:full_loop"} and "strategy:per_step" in weak


def test_another_drafters_check_is_evidence_for_the_strategy_chosen():
    assert len(tags("drafter.x", (4, 1))) == 1


def test_every_check_of_a_backend_is_tagged():
    planned = plan("torch_reference", device=CPU).report
    assert [result.check for result in planned.results if not result.tags] == []
    assert {result.outcome for result in planned.results} == {Outcome.NOT_RUN}


def test_a_report_records_claims_contract_and_tags():
    report = check_backend("torch_reference", device=CPU, tags=["contract:declared"])
    assert report.contract == "1.0" and report.claims["feature:sinks"].claimed
    assert {tag for result in report.results for tag in result.tags} == {"contract:declared"}


@pytest.mark.parametrize(
    ("tag", "yes", "no"),
    [
        ("feature:sinks", TorchReference(), Weak()),
        ("kv:float8_e4m3fn", TorchReference(), Weak()),
        ("strategy:full_loop", TorchReference(), Weak()),
        ("graph:advance", TorchReference(), Weak()),
    ],
)
def test_claims_are_those_of_the_record_and_the_builder(tag, yes, no):
    assert claims(yes)[tag].claimed and not claims(no)[tag].claimed


def test_the_claim_to_advance_has_its_level_and_its_reason():
    claim = claims(Weak())["graph:advance"]
    assert (claim.level, claim.reason) == ("rebuild", "for the test")


def test_a_backend_for_another_device_claims_nothing_and_says_why():
    found = claims(Elsewhere(), "page:64")
    assert list(found) == [EVERYTHING] and not found[EVERYTHING].claimed and "not on cpu" in found[EVERYTHING].reason


def test_a_claim_that_cannot_be_read_is_none_and_says_so():
    class Odd(ReferenceBuilder):
        graph_support = "always"

    class OddBackend(TorchReference):
        builder = Odd

    claim = claims(OddBackend())["graph:capture"]
    assert not claim.claimed and "cannot be read: ValueError" in claim.reason
