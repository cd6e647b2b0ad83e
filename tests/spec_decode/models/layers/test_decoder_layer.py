"""Decoder layers: fused kernels and torch give the same numbers, and which of the two each part uses."""

import pytest
import torch

from attn_backends.kernels.linear import skinny_linear as skinny
from attn_backends.kernels.linear.skinny_linear import MAX_ROWS
from spec_decode.models.layers.decoder_layer import DecoderLayer, LatentDecoderLayer, LayerOptions, make_layer
from spec_decode.models.layers.rope import RotaryEmbedding
from tests.factories import make_config, make_latent_config


def averaging(inputs):
    """No attention to speak of, but each of its inputs matters."""
    norm, value = inputs.kv_a_norm_rope, inputs.value
    query, key, _ = inputs._replace(kv_a_norm_rope=None).normed_and_rotated()
    keys = key if norm is None else key * norm.weight
    out = query + keys.mean(1, keepdim=True)
    out[..., : value.shape[-1]] += value.mean(1, keepdim=True)
    return out[..., : value.shape[-1]]


@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later layer"])
@pytest.mark.parametrize(
    ("layer", "config"), [(DecoderLayer, make_config()), (LatentDecoderLayer, make_latent_config())]
)
def test_layer_of_few_rows_matches_many(layer, config, first):
    torch.manual_seed(0)
    module, rotary = layer(config, 0), RotaryEmbedding(config)
    for norm in (module.attn_norm, module.mlp_norm):
        norm.weight.data.normal_(1, 0.3)
    x, positions = torch.randn(MAX_ROWS + 3, config.hidden_size), torch.arange(MAX_ROWS + 3)
    delta = None if first else torch.randn_like(x)
    wanted, added = module(x, delta, rotary(positions), averaging)
    part = slice(1, 1 + MAX_ROWS)
    found, rest = module(x[part], None if first else delta[part], rotary(positions[part]), averaging)
    assert rest is None and added is not None
    torch.testing.assert_close(found, (wanted + added)[part], rtol=1e-5, atol=1e-5)


@pytest.mark.outside_inference_mode
def test_layer_of_few_rows_has_gradients():
    module, rotary = DecoderLayer(make_config(), 0), RotaryEmbedding(make_config())
    x, delta = module(torch.randn(3, 32), None, rotary(torch.arange(3)), averaging)
    (x + delta).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def fused_calls(monkeypatch):
    """How the skinny kernel was called since: by what it fused."""

    def op(*arguments):
        found = skinny.SkinnyLinear(*arguments)
        names = ("norm", "delta", "residual")
        calls.append("+".join([n for n in names if getattr(found, n) is not None] + ["gate"] * found.gated))
        return found.reference()

    calls = []
    monkeypatch.setattr(skinny, "_skinny_linear", op)
    return calls


@pytest.mark.parametrize(
    ("rows", "options", "fused"),
    [
        (1, {}, ["norm+delta", "residual", "norm+gate", "residual"]),
        (MAX_ROWS, {}, ["norm+delta", "residual", "norm+gate", "residual"]),
        (MAX_ROWS + 1, {}, []),
        (1, {"qkv_bias": True}, ["residual", "norm+gate", "residual"]),
        (1, {"qk_norm": True}, ["norm+delta", "residual", "norm+gate", "residual"]),
        (MAX_ROWS, {"out_bias": True}, ["norm+delta", "norm+delta+gate", "residual"]),
        (1, {"norms": "both", "gelu": True}, ["norm+delta", "", "norm+delta", ""]),
        (1, {"norms": "after"}, ["", "", "gate", ""]),
    ],
)
def test_layer_of_few_rows_fuses_expected_parts(rows, options, fused, monkeypatch):
    config = make_config()
    module, rope = make_layer(config, 0, LayerOptions(**options)), RotaryEmbedding(config)(torch.arange(rows))
    calls = fused_calls(monkeypatch)
    x, delta = torch.randn(2, rows, config.hidden_size)
    module(x, delta, rope, averaging)
    assert calls == fused


def test_latent_layer_fuses_only_its_feed_forward(monkeypatch):
    config = make_latent_config()
    module, rope = LatentDecoderLayer(config, 0), RotaryEmbedding(config)(torch.arange(2))
    calls = fused_calls(monkeypatch)
    module(torch.randn(2, config.hidden_size), None, rope, averaging)
    assert [call for call in calls if call] == ["norm+delta+gate", "residual"]
