"""The draft of the kit: what it computes, in any precision, and what a broken backend cannot do to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import AttentionKind
from spec_decode.model_api import AttentionInputs, DraftInputs, LayerGroup
from spec_decode.testing.plain_draft import PlainDraft
from tests.factories import CPU, make_spec

GROUPED = make_spec(dtype=torch.bfloat16)
LATENT = replace(GROUPED, kind=AttentionKind.MLA, num_kv_heads=1, head_dim=80, value_dim=64, sinks=True)


def draft_of(spec, layers=(0, 1)):
    return PlainDraft([LayerGroup(name="draft", spec=spec, layers=layers)], 64, CPU)


def inputs(draft, dtype, attention, ids=(3, 1, 4, 1)):
    hidden = torch.randn(len(ids), draft.hidden_size, generator=torch.Generator().manual_seed(1))
    return DraftInputs(torch.tensor(ids), hidden.to(dtype), torch.arange(len(ids)), attention)


def own_value(seen):
    """An attention in which each token sees itself; it keeps what a layer passed."""

    def attend(given: AttentionInputs) -> torch.Tensor:
        seen.append(given)
        _, _, value = given.normed_and_rotated()
        return value.repeat_interleave(given.query.shape[1] // value.shape[1], 1)

    return attend


@pytest.mark.parametrize("spec", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_layers_pass_what_their_spec_says(spec):
    seen = []
    draft = draft_of(spec)
    states = draft.forward(inputs(draft, spec.dtype, own_value(seen)))
    assert states.shape == (4, draft.hidden_size) and states.dtype is spec.dtype
    assert [each.layer for each in seen] == [0, 1]
    for each in seen:
        assert each.query.shape == (4, spec.num_q_heads, spec.head_dim)
        assert each.key.shape == (4, spec.num_kv_heads, spec.head_dim)
        assert each.value.shape == (4, spec.num_kv_heads, spec.out_dim)
        assert (each.sinks is not None) is spec.sinks and (each.rope is None) is (spec is LATENT)


@pytest.mark.parametrize("spec", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_a_copy_in_fp64_has_the_same_weights(spec):
    draft, seen = draft_of(spec), []
    copy = draft.on_cpu(torch.float64)
    for mine, wide in zip(draft.parameters(), copy.parameters(), strict=True):
        assert torch.equal(mine.double(), wide) and wide.dtype is torch.float64
    found, wanted = (m.forward(inputs(m, d, own_value(seen))) for m, d in ((draft, spec.dtype), (copy, torch.float64)))
    torch.testing.assert_close(found.double(), wanted, rtol=0.1, atol=0.1)


def test_an_id_outside_the_vocabulary_ends_nothing():
    draft = draft_of(GROUPED)
    states = draft.forward(inputs(draft, GROUPED.dtype, own_value([]), ids=(2**31, -7, draft.vocab_size)))
    assert states.isfinite().all()


def test_layers_of_several_groups_run_in_order():
    groups = [LayerGroup(name=str(i), spec=GROUPED, layers=layers) for i, layers in enumerate([(1,), (0, 2)])]
    seen = []
    draft = PlainDraft(groups, 64, CPU)
    draft.forward(inputs(draft, GROUPED.dtype, own_value(seen)))
    assert [each.layer for each in seen] == [0, 1, 2]
