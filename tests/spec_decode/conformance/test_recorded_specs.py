"""What a report holds of the attention that its checks ran."""

import pytest
import torch

from attn_backends import registry
from spec_decode.conformance import check_backend
from spec_decode.testing.draft_fixture import DraftFixture, DraftShape
from spec_decode.testing.specs_run import specs_run
from spec_decode.testing.subject import Subject

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("check", "case"),
    [
        ("numerics.attention_is_right", "bf16-decode"),
        ("drafter.strategies_agree", "k1-n1"),
        ("drafter.strategies_agree_on_trees", "k1-n3-dynamic"),
    ],
)
def test_attention_or_draft_check_records_its_spec(check, case):
    (found,) = check_backend("torch_reference", device=CPU, checks=[f"{check}[[]{case}]"]).results
    assert found.spec is not None and found.outcome.value == "pass"
    spec = found.spec.spec()
    assert spec.tree is ("trees" in check) and (spec.dtype is torch.bfloat16) is case.startswith("bf16")
    assert (spec.sliding_window is None) is (found.family == "numerics") and (found.batch is None) is (
        found.family == "drafter"
    )


def test_check_without_attention_records_no_spec():
    (found,) = check_backend("torch_reference", device=CPU, checks=["contract.version_matches"], report=True).results
    assert found.spec is None


def test_draft_over_several_specs_records_none():
    with specs_run() as ran:
        DraftFixture.make(Subject(registry.get("torch_reference"), CPU), 2, 3, DraftShape.GROUPS)
    assert len(ran) == 2
