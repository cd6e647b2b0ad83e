"""Drafts that return only some tokens' states: the same numbers, and less work after the last attention."""

import pytest
import torch

from spec_decode.model_api import DraftInputs
from spec_decode.models import EagleDraft, LlamaTarget
from tests.factories import make_config, make_latent_config
from tests.spec_decode.models.layers.test_decoder_layer import averaging

KEPT = torch.tensor([1, 4])
CONFIGS = {"grouped": make_config(), "latent": make_latent_config()}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def draft(request):
    torch.manual_seed(0)
    return EagleDraft(request.param, LlamaTarget(make_config()))


def inputs(draft, keep=None):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, draft.hidden_size, generator=generator)
    return DraftInputs(torch.arange(6), hidden, torch.arange(6), averaging, keep)


def test_kept_states_match_those_of_all_tokens(draft):
    found = draft(inputs(draft, lambda x: x[KEPT]))
    torch.testing.assert_close(found, draft(inputs(draft))[KEPT], rtol=1e-5, atol=1e-5)


def test_the_feed_forward_leaves_tokens_out(draft):
    rows = []
    draft.layers[0].down.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    draft(inputs(draft, lambda x: x[KEPT]))
    assert rows == [len(KEPT)]
