"""Drafts that return only some tokens' states: the same numbers, and less work after the last attention."""

import pytest
import torch

from spec_decode.model_api import DraftModel
from spec_decode.models import EagleDraft, LlamaTarget
from spec_decode.testing.draft_fixture import StackedDraft
from tests.factories import make_config, make_latent_config
from tests.spec_decode.models.layers.test_decoder_layer import averaging

KEPT = torch.tensor([1, 4])
DRAFTS = {
    "one layer": (EagleDraft, make_config()),
    "a layer of latents": (EagleDraft, make_latent_config()),
    "three layers": (StackedDraft, make_config(num_layers=3)),
}


@pytest.fixture(params=DRAFTS.values(), ids=DRAFTS)
def draft(request):
    torch.manual_seed(0)
    kind, config = request.param
    return kind(config, LlamaTarget(make_config()))


def inputs(draft):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, draft.hidden_size, generator=generator)
    return torch.arange(6), hidden, torch.arange(6), averaging


def test_states_of_kept_tokens_are_those_of_all_tokens(draft):
    found = draft.forward_kept(*inputs(draft), lambda x: x[KEPT])
    torch.testing.assert_close(found, draft.forward(*inputs(draft))[KEPT], rtol=1e-5, atol=1e-5)


def test_only_the_last_layers_feed_forward_leaves_tokens_out(draft):
    rows = []
    for layer in draft.stack:
        layer.down.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    draft.forward_kept(*inputs(draft), lambda x: x[KEPT])
    assert rows == [6] * (len(draft.stack) - 1) + [len(KEPT)]


def test_a_draft_that_leaves_nothing_out_has_its_states_cut(draft):
    found = DraftModel.forward_kept(draft, *inputs(draft), lambda x: x[KEPT])
    assert torch.equal(found, draft.forward(*inputs(draft))[KEPT])
