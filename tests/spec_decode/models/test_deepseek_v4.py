"""DeepSeek-V4's multi-token prediction against its definition in fp64, one token, head and stream at a time."""

from pathlib import Path

import pytest
import torch

from attn_backends import Accepted, get
from spec_decode.drafter import Strategy
from spec_decode.models import CheckpointError, deepseek_v4
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.layers.window_attention import read_window_shape
from tests.factories import CPU
from tests.spec_decode.models.generated_mtp import (
    HIDDEN,
    V4_CONFIG,
    DraftFixture,
    StubTarget,
    assert_drafts_are_those_of_eager,
    assert_drafts_are_those_without_a_cache,
    assert_pieces_say_what_whole_texts_say,
    close,
    v4_tensors,
    write,
)
from tests.spec_decode.models.plain import in_fp64, mixture, rms, turn

STREAMS = V4_CONFIG["hc_mult"]
WIDTH = STREAMS * HIDDEN
FORMS = {
    "as_published": V4_CONFIG,
    "two_streams_in_one_group": {**V4_CONFIG, "hc_mult": 2, "o_groups": 1, "hc_sinkhorn_iters": 1},
    "no_limit": {**V4_CONFIG, "swiglu_limit": None},
}


def load(folder, target, dtype=torch.float32):
    return deepseek_v4.load(TensorStore.open(folder), target, dtype=dtype, device=CPU)


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request, tmp_path):
    config, tensors = request.param, v4_tensors(request.param)
    target = StubTarget(target_states_size=config["hc_mult"] * HIDDEN)
    return load(write(tmp_path, config, tensors), target), Oracle(config, tensors, target)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, V4_CONFIG, v4_tensors(V4_CONFIG))


@pytest.fixture
def target():
    return StubTarget(target_states_size=WIDTH)


class Oracle:
    def __init__(self, config, tensors, target):
        self.config, self.weight, self.target = config, in_fp64(tensors, "mtp.0."), target
        self.eps, self.streams = config["rms_norm_eps"], config["hc_mult"]

    def normed(self, x, name):
        return rms(x, self.eps) * self.weight[f"{name}.weight"]

    def attention(self, x):
        config, weight = self.config, in_fp64(self.weight, "attn.")
        dim, rope, heads = config["head_dim"], config["qk_rope_head_dim"], config["num_attention_heads"]
        frequency = config["rope_theta"] ** (-2 * torch.arange(rope // 2).double() / rope)
        angles = torch.arange(len(x)).double()[:, None] * frequency

        def rotated(v, angles):
            return torch.cat([v[..., : dim - rope], turn(v[..., dim - rope :], angles)], -1)

        query = self.normed(x @ weight["wq_a.weight"].T, "attn.q_norm") @ weight["wq_b.weight"].T
        query = rotated(rms(query.view(len(x), heads, dim), self.eps), angles)
        latent = rotated(self.normed(x @ weight["wkv.weight"].T, "attn.kv_norm"), angles)
        out = torch.zeros(len(x), heads, dim).double()
        for token in range(len(x)):
            seen = latent[max(0, token + 1 - config["sliding_window"]) : token + 1]
            for head in range(heads):
                scores = (seen @ query[token, head] / dim**0.5).exp()
                out[token, head] = scores @ seen / (scores.sum() + weight["attn_sink"][head].exp())
        out = rotated(out, -angles).view(len(x), config["o_groups"], -1)
        downs = weight["wo_a.weight"].chunk(config["o_groups"])
        return torch.cat([out[:, g] @ down.T for g, down in enumerate(downs)], -1) @ weight["wo_b.weight"].T

    def connected(self, streams, name, norm, block):
        """streams [T, S, H] through a block, by the formulas of the mHC paper with the constants as published."""
        weight, count, eps = self.weight, self.streams, self.config["hc_eps"]
        mixes = rms(streams.flatten(1), self.eps) @ weight[f"hc_{name}_fn"].T
        scale, base = weight[f"hc_{name}_scale"], weight[f"hc_{name}_base"]
        read = (mixes[:, :count] * scale[0] + base[:count]).sigmoid() + eps
        write = 2 * (mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count]).sigmoid()
        carry = (mixes[:, 2 * count :] * scale[2] + base[2 * count :]).view(-1, count, count).softmax(2) + eps
        carry = carry / (carry.sum(1, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            carry = carry / (carry.sum(2, keepdim=True) + eps)
            carry = carry / (carry.sum(1, keepdim=True) + eps)
        x = block(self.normed(sum(read[:, s, None] * streams[:, s] for s in range(count)), norm))
        written = [
            write[:, to, None] * x + sum(carry[:, of, to, None] * streams[:, of] for of in range(count))
            for to in range(count)
        ]
        return torch.stack(written, 1)

    def feed_forward(self, x):
        limit = self.config["swiglu_limit"] or float("inf")
        return mixture(x, self.config, in_fp64(self.weight, "ffn."), ("w1", "w3", "w2"), "gate.bias", limit=limit)

    def states(self, ids, hidden):
        embedded = self.normed(self.target.embed.weight.double()[ids], "enorm") @ self.weight["e_proj.weight"].T
        streams = self.normed(hidden.double().view(len(ids), self.streams, HIDDEN), "hnorm")
        streams = streams @ self.weight["h_proj.weight"].T + embedded[:, None]
        streams = self.connected(streams, "attn", "attn_norm", self.attention)
        return self.connected(streams, "ffn", "ffn_norm", self.feed_forward).flatten(1)

    def logits(self, states):
        mixes = rms(states.double(), self.eps) @ self.weight["hc_head_fn"].T
        read = (mixes * self.weight["hc_head_scale"] + self.weight["hc_head_base"]).sigmoid() + self.config["hc_eps"]
        streams = states.double().view(len(states), self.streams, HIDDEN)
        x = sum(read[:, s, None] * streams[:, s] for s in range(self.streams))
        return self.normed(x, "norm") @ self.target.lm_head.weight.double().T


def test_prefill_and_continuation_say_what_the_whole_text_says(form):
    assert_pieces_say_what_whole_texts_say(*form, [13, 7], [8, 5])


def test_the_drafter_drafts_what_the_draft_without_a_cache_drafts(form):
    assert_drafts_are_those_without_a_cache(*form)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", [Strategy.DEVICE_LOOP, Strategy.FULL_LOOP, Strategy.PER_STEP])
def test_every_strategy_that_captures_the_step_drafts_what_eager_drafts(folder, target, strategy, temperature):
    assert_drafts_are_those_of_eager(load(folder, target), strategy, temperature)


def test_the_sparse_kernels_take_the_layers_attention_and_agree_with_the_reference(folder, target):
    model = load(folder, target)
    spec = model.layer_groups(16)[0].spec
    assert (spec.sliding_window, spec.sinks, spec.out_dim) == (6, True, 64)
    assert isinstance(get("sparse_swa_mla").supports(spec, CPU), Accepted)
    for (tokens, logits), (wanted, wanted_logits) in zip(
        DraftFixture(model, "sparse_swa_mla").drafts(None), DraftFixture(model).drafts(None), strict=True
    ):
        assert tokens.tolist() == wanted.tolist()
        close(logits, wanted_logits.double())


def test_sizes_as_published_give_the_published_attention():
    config = {**V4_CONFIG, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128,
              "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024}  # fmt: skip
    spec = read_window_shape(ConfigReader(config, "config.json"), HIDDEN, 1e-6).spec(64, torch.bfloat16)
    assert (spec.head_dim, spec.out_dim, spec.sliding_window, spec.softmax_scale) == (512, 512, 128, 512**-0.5)
    assert isinstance(get("sparse_swa_mla").supports(spec, CPU), Accepted)


def test_a_bf16_draft_keeps_sinks_router_and_connections_in_fp32(folder):
    model = load(folder, StubTarget(target_states_size=WIDTH).bfloat16(), torch.bfloat16)
    wide = {name.split(".")[0] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {"attention_connection", "attention", "mlp_connection", "mlp", "collapse"}
    assert {name for name, p in model.attention.named_parameters() if p.dtype == torch.float32} == {"sinks"}
    tokens = DraftFixture(model).drafts(None)[0][0]
    assert tokens.min() >= 0


def serves(config):
    return deepseek_v4.serves(TensorStore(Path("generated"), config, {}))


def test_only_the_checkpoints_of_the_family_are_served():
    assert serves(V4_CONFIG)
    assert not serves({"architectures": ["DeepseekV41ForCausalLM"]}) and not serves({})


CONFIG_PROBLEMS = {
    "compressed": ({"compress_ratios": [0, 4, 4]}, "0 or 1 at the draft's layer 2, got 4"),
    "groups": ({"o_groups": 3}, "4 heads in 3 groups"),
    "rotary": ({"qk_rope_head_dim": 66}, "66 dims of 64"),
    "streams": ({"hc_mult": 0}, "hc_mult .*at least 1.* got 0"),
    "iterations": ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters .*at least 1.* got 0"),
    "missing": ({"hc_mult": None}, "must say hc_mult"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIG_PROBLEMS.values(), ids=CONFIG_PROBLEMS)
def test_a_config_that_cannot_be_served_is_refused(tmp_path, target, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, {**V4_CONFIG, **changes}, v4_tensors(V4_CONFIG)), target)


def test_a_target_that_hands_out_one_stream_is_refused(folder):
    with pytest.raises(CheckpointError, match=r"size 128, this target returns 32.*residual streams"):
        load(folder, StubTarget())
