from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen3_5TextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from attn_backends import CapabilitiesError, Sizes, StateInputs, get_state
from attn_backends.torch_state import TorchState
from builders import BatchBuffers, BatchError, Recurrence, RequestTables, StateSpec
from tests.factories import CPU

SPEC = StateSpec(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, journal=8, dtype=torch.float32)


class Slots:
    """One layer with three slots, and batches of requests in given slots."""

    def __init__(self, spec, max_tokens=64):
        self.spec, self.backend = spec, get_state("torch_state")
        (self.cache,) = self.backend.allocate_state(spec, 1, 3, CPU)
        tables = RequestTables(page_sizes=[256], num_pages=[3], max_reqs=3, max_seq_len=256, device=CPU)
        self.buffers = BatchBuffers(tables, max_tokens=max_tokens)
        self.builder = self.backend.builder(spec, CPU, max_reqs=3, max_tokens=max_tokens, max_seq_len=256)

    def metadata(self, slots, query_lens, seq_lens, max_seq_len=256, **how):
        self.buffers.tables.load([[[slot] for slot in slots]], [256] * len(slots))
        rows, tokens = self.buffers.load(query_lens, seq_lens)
        shape = {"num_reqs": rows, "num_tokens": tokens, "max_query_len": max(query_lens)}
        view = self.buffers.view(0, **shape, max_seq_len=max_seq_len, uniform=len({*query_lens}) == 1)
        return self.builder.build(view, **how)

    def step(self, inputs, *batch, **how):
        metadata = self.metadata(*batch, **how)
        out = self.backend.forward(inputs, self.cache, metadata, spec=self.spec)
        self.backend.end_step(self.cache.lengths, metadata, spec=self.spec)
        return out

    def lengths(self):
        return [part.tolist() for part in (self.cache.lengths.base, self.cache.lengths.held, self.cache.lengths.lost)]


def inputs_of(spec, tokens, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return StateInputs(
        x=torch.randn(tokens, spec.conv_channels, generator=draw),
        decay=-torch.rand(tokens, *spec.decay_dims, generator=draw),
        beta=torch.rand(tokens, spec.num_value_heads, generator=draw),
        weight=torch.randn(spec.conv_channels, spec.conv_width, generator=draw),
        bias=torch.randn(spec.conv_channels, generator=draw),
    )


@pytest.mark.parametrize(
    ("recurrence", "reference"),
    [
        (Recurrence.GATED_DELTA, torch_recurrent_gated_delta_rule),
        (Recurrence.KDA, recurrent_kimi_delta_attention),
    ],
)
def test_recurrence_equals_transformers(recurrence, reference):
    spec = replace(SPEC, recurrence=recurrence, num_value_heads=2, conv_width=1)
    slots, inputs = Slots(spec), inputs_of(spec, 12)
    out = slots.step(inputs, [1], [12], [12], absorb=True)
    mixed = F.silu(inputs.x * inputs.weight[:, 0] + inputs.bias)
    q, k, v = (part.unflatten(-1, (2, -1))[None] for part in mixed.split([32, 32, 16], -1))
    wanted, state = reference(
        q, k, v, g=inputs.decay[None], beta=inputs.beta[None], initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    found, _ = slots.backend.read(slots.cache, torch.tensor([1]), torch.tensor([12]))
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(found[0], state[0])


def test_ssd_equals_transformers():
    spec = replace(SPEC, recurrence=Recurrence.SSD, conv_width=1)
    slots, inputs, rate = Slots(spec), inputs_of(spec, 12), torch.tensor([-0.1, -0.5, -1.0, -2.0])
    inputs = inputs._replace(decay=inputs.beta * rate, skip=torch.randn(4))
    out = slots.step(inputs, [1], [12], [12], absorb=True)
    mixed = F.silu(inputs.x * inputs.weight[:, 0] + inputs.bias)[None]
    c, b, x = (mixed[..., 32 * at :][..., :32].unflatten(-1, (heads, -1)) for at, heads in enumerate((2, 2, 4)))
    wanted, state = mamba2_chunk_scan(x, inputs.beta[None], rate, b, c, 5, D=inputs.skip, return_final_states=True)
    found, _ = slots.backend.read(slots.cache, torch.tensor([1]), torch.tensor([12]))
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(found[0], state[0].mT)


@torch.no_grad()
def test_layer_of_qwen3_5_is_followed_through_rejected_drafts():
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=32, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=8, linear_conv_kernel_dim=4, head_dim=8,
    )  # fmt: skip
    layer = Qwen3_5GatedDeltaNet(config, 0).eval()
    text = torch.randn(30, 32)
    x, z, b, a = (part(text) for part in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
    inputs = StateInputs(x, -layer.A_log.exp() * F.softplus(a + layer.dt_bias), b.sigmoid(), layer.conv1d.weight[:, 0])
    slots, found, at = Slots(SPEC), [], 0
    for kept in (3, 1, 4, 2, 1, 1, 4, 3, 2, 4, 4, 1):
        tokens = (F.pad(part[at : at + 4], (0, 0, 0, max(0, at - 26))) for part in inputs[:3])
        given = StateInputs(*tokens, inputs.weight)
        # The rejected tokens are others than those that follow.
        given.x[kept:] = 5.0
        found.append(slots.step(given, [2], [4], [at + 4])[:kept])
        at += kept
    out = layer.out_proj(layer.norm(torch.cat(found).reshape(-1, 8), z.reshape(-1, 8)).reshape(30, -1))
    torch.testing.assert_close(out, layer(text[None])[0])


STEPS = {
    "a prompt": ([([1], [5], [5], {"absorb": True})], [5, 0, 0]),
    "a first step": ([([1], [3], [3], {})], [0, 3, 0]),
    "a full journal": ([([1], [4], [4], {}), ([1], [4], [8], {}), ([1], [2], [9], {})], [7, 2, 0]),
    "room is kept": ([([1], [4], [4], {}), ([1], [2], [6], {"reserve": 3})], [4, 2, 0]),
    "rejected drafts": ([([1], [4], [4], {}), ([1], [3], [4], {})], [0, 4, 0]),
    "a lost start": ([([1], [2], [9], {})], [0, 0, 1]),
    "a context before the checkpoint": ([([1], [5], [5], {"absorb": True}), ([1], [2], [6], {})], [5, 0, 1]),
    "no fold and no room": ([([1], [6], [6], {}), ([1], [3], [9], {"may_fold": False})], [0, 6, 1]),
    "a length beyond the bound": ([([1], [3], [3], {"max_seq_len": 2})], [0, 0, 0]),
    "a prompt after a lost state": ([([1], [2], [9], {}), ([1], [2], [2], {"absorb": True})], [2, 0, 1]),
}


@pytest.mark.parametrize(("steps", "wanted"), STEPS.values(), ids=STEPS)
def test_lengths_after_steps(steps, wanted):
    slots = Slots(SPEC)
    for rows, query_lens, seq_lens, how in steps:
        slots.step(inputs_of(SPEC, sum(query_lens)), rows, query_lens, seq_lens, **how)
    assert [part[1] for part in slots.lengths()] == wanted


def test_slot_outside_the_cache_is_inert():
    slots, inputs = Slots(SPEC), inputs_of(SPEC, 6)
    metadata = slots.metadata([1, 2], [3, 3], [3, 3])
    metadata.slots.copy_(torch.tensor([1, 3]))
    out = slots.backend.forward(inputs, slots.cache, metadata, spec=SPEC)
    slots.backend.end_step(slots.cache.lengths, metadata, spec=SPEC)
    assert slots.lengths() == [[0, 0, 0], [0, 3, 0], [0, 0, 0]]
    assert out[:3].ne(0).any() and not out[3:].ne(0).any()


def test_tables_of_more_slots_than_the_cache_are_refused():
    slots = Slots(SPEC)
    (slots.cache,) = slots.backend.allocate_state(SPEC, 1, 2, CPU)
    with pytest.raises(BatchError, match=r"must have the 3 slots .* got 2; .*num_pages=2"):
        slots.step(inputs_of(SPEC, 3), [1], [3], [3])


def test_copy_of_a_state_that_is_not_there_is_lost():
    slots = Slots(SPEC)
    slots.step(inputs_of(SPEC, 5), [0], [5], [5])
    for length, lost in ((4, 0), (6, 1)):
        slots.backend.copy([slots.cache], *(torch.tensor([each]) for each in (0, 1, length)))
        assert [part[1] for part in slots.lengths()] == [length, 0, lost]
    state, window = slots.backend.read(slots.cache, torch.tensor([0, 0]), torch.tensor([6, 5]))
    assert state[0].isnan().all() and window[0].isnan().all() and not state[1].isnan().any()


UNSERVED = {
    "dtype": ({"dtype": torch.float64}, "dtype must be float32 or float16 or bfloat16, got float64"),
    "state_dtype": ({"state_dtype": torch.bfloat16}, "state_dtype must be float32, got bfloat16"),
    "both": ({"dtype": torch.float64, "state_dtype": torch.float16}, "dtype must .*; state_dtype must "),
}


@pytest.mark.parametrize(("changes", "words"), UNSERVED.values(), ids=UNSERVED)
def test_nothing_is_allocated_for_an_unserved_spec(changes, words):
    with pytest.raises(BatchError, match=words):
        TorchState().allocate_state(replace(SPEC, **changes), 1, 3, CPU)


class Narrow(TorchState):
    """Serves one recurrence, powers of two and no grouped keys."""

    capabilities = replace(
        TorchState.capabilities, recurrences=(Recurrence.KDA,), key_dims=Sizes(minimum=64, power_of_two=True),
        journals=Sizes(maximum=4), features=frozenset(),
    )  # fmt: skip


def test_rejection_lists_every_reason():
    reasons = Narrow().supports(replace(SPEC, tree=True), torch.device("meta")).reasons
    assert reasons == (
        "runs on cpu and cuda, not on meta",
        "recurrence must be kda, got gated_delta",
        "key_dim must be at least 64, a power of two, got 16",
        "journal must be 1 to 4, got 8",
        "has no grouped_keys",
        "has no tree",
    )


@pytest.mark.parametrize(("recurrence", "refused"), [(Recurrence.KDA, True), (Recurrence.SSD, False)])
def test_triton_takes_longer_keys_without_a_delta_rule(recurrence, refused):
    spec = replace(SPEC, recurrence=recurrence, key_dim=256)
    reasons = get_state("triton_state").unsupported_reasons(spec, torch.device("cuda"))
    assert ("key_dim must be at most 128 for kda, got 256" in reasons) == refused


def test_skip_is_refused_where_outputs_have_none():
    slots, inputs = Slots(SPEC), inputs_of(SPEC, 3)
    with pytest.raises(BatchError, match="skip must be None for gated_delta"):
        slots.step(inputs._replace(skip=torch.zeros(4)), [1], [3], [3])


@pytest.mark.parametrize(("layers", "slots", "words"), [(0, 3, "got 0 and 3"), (1, 0, "got 1 and 0"), (1, 2.0, "2.0")])
def test_group_without_layers_or_slots_is_refused(layers, slots, words):
    with pytest.raises(BatchError, match=words):
        TorchState().allocate_state(SPEC, layers, slots, CPU)


def test_incomplete_claims_are_refused():
    with pytest.raises(CapabilitiesError, match=r"recurrences must be .*got \(\); key_dims must be a Sizes, got 64"):
        replace(TorchState.capabilities, recurrences=(), key_dims=64)
