"""State groups beside KV groups: their slots, their metadata, and what is refused."""

from functools import partial

import pytest
import torch

from attn_backends import StateInputs, get, get_state
from attn_backends.state_cache import bytes_of_slot
from builders import BatchError, Recurrence, StateSpec
from spec_decode.graphs import runtime_for
from spec_decode.model_api import LayerGroup
from spec_decode.paged import GraphMode, StepBuffers, build_ragged, make_group, plan_uniform_step
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import CachesTooLarge, make_state_groups
from tests.factories import CPU, make_spec, make_tables

SPEC = StateSpec(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3, journal=8, dtype=torch.float32)
CONV = StateSpec(recurrence=Recurrence.CONV, num_value_heads=1, value_dim=8, journal=8, dtype=torch.float32)
TEXT, LAYERS = 16, (1, 4)
WEIGHT = torch.randn(SPEC.conv_channels, SPEC.conv_width, generator=torch.Generator().manual_seed(1))


def make_groups(choice=None, layers=LAYERS, slots=3):
    return make_state_groups("target", [LayerGroup(name="state", spec=SPEC, layers=layers)], choice, slots, CPU)


def inputs(start, end):
    """What a text's projections give for its tokens start .. end - 1."""
    drawn = torch.rand(TEXT, SPEC.conv_channels + 4, generator=torch.Generator().manual_seed(2))
    x, decay, beta = drawn[start:end].split([SPEC.conv_channels, 2, 2], 1)
    return StateInputs(x - 0.5, -decay, beta.contiguous(), WEIGHT)


class Texts:
    """Three copies of a text, each with a slot of its own."""

    def __init__(self):
        self.groups = [make_group("kv", get("torch_reference"), make_spec(), [0], num_pages=12, device=CPU)]
        self.groups += make_groups()
        self.tables = make_tables([TEXT] * 3, page_sizes=(4, TEXT), max_seq_len=TEXT)
        self.state = self.groups[1]

    def prefill(self, start, end):
        _, metadata = build_ragged(self.groups, self.tables, [end - start] * 3, [end] * 3)
        attention = PagedAttention(self.groups, metadata)
        out = [attention.recur(layer, tripled(inputs(start, end))) for layer in LAYERS]
        self.state.end_step(metadata[1])
        return [each[-(end - start) :] for each in out]

    def make_step(self, query_len, mode):
        """A function that runs query_len tokens after a context, and returns the outputs of the last layer."""
        plan = plan_uniform_step([group.facts(CPU) for group in self.groups], query_len, mode)
        buffers = StepBuffers(self.groups, self.tables, plan, query_len=query_len)
        context, given = torch.zeros(3, dtype=torch.int32), tripled(inputs(0, query_len))
        out = torch.zeros(3 * query_len, 2, 3)

        def run(attention):
            for layer in LAYERS:
                out.copy_(attention.recur(layer, given))
            buffers.end_step()

        if mode is GraphMode.NONE:
            replay = partial(run, buffers.attention)
        else:
            buffers.prepare_capture(3)
            runtime = runtime_for(CPU)
            if mode is GraphMode.PIECEWISE:
                graph = runtime.capture_pieces(lambda split: run(buffers.split_attention(split)))
                assert len(graph._parts) == 1 + 2 * len(LAYERS)  # every recurrence runs between two pieces
                replay = graph.replay
            else:
                replay = runtime.capture(lambda: run(buffers.attention)).replay

        def step(start):
            context.fill_(start)
            for part, new in zip(given[:3], tripled(inputs(start, start + query_len))[:3], strict=True):
                part.copy_(new)
            buffers.build_at(context, 3)
            replay()
            return out[-query_len:].clone()

        return step


def tripled(given):
    return given._replace(**{name: getattr(given, name).repeat(3, 1) for name in ("x", "decay", "beta")})


@pytest.mark.parametrize("mode", GraphMode)
def test_prompts_and_steps_of_any_length_compute_one_text(mode):
    whole = Texts().prefill(0, TEXT)[-1]
    texts = Texts()
    chunks = [texts.prefill(0, 3)[-1], texts.prefill(3, 5)[-1]]
    drafted, plain = texts.make_step(4, mode), texts.make_step(1, mode)
    # Drafts, of which one to three are rejected; no drafts; drafts again.
    found = [drafted(5)[:2], drafted(7)[:1], plain(8), plain(9), drafted(10)[:3], drafted(12)]
    expected = [whole[:3], whole[3:5], whole[5:7], whole[7:8], whole[8:9], whole[9:10], whole[10:13], whole[12:16]]
    for one, other in zip([*chunks, *found], expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not texts.state.lengths.lost.any()


def test_state_that_does_not_fit_is_lost_until_another_begins():
    texts = Texts()
    texts.prefill(0, 4)
    texts.make_step(1, GraphMode.NONE)(9)
    assert texts.state.lengths.lost.tolist() == [1, 1, 1]
    texts.state.begin(torch.tensor([2, 0], dtype=torch.int32))
    assert texts.state.lengths.lost.tolist() == [0, 1, 0]


def test_layers_of_the_other_kind_are_refused():
    texts = Texts()
    attention = PagedAttention(texts.groups, [None, None])
    with pytest.raises(BatchError, match=r"layer 0 asks for a recurrence and is in no state group.*\[1, 4\]"):
        attention.recur(0, inputs(0, 1))
    with pytest.raises(BatchError, match=r"layer 4 asks for attention and is in no KV group.*\[0\]"):
        attention.store(4, None, None, None)


def test_mapping_names_the_backend_of_a_state_group():
    backend = get_state("torch_state")
    assert make_groups({"state": backend})[0].backend is backend
    assert make_groups({"full": get("torch_reference")})[0].backend.name == "torch_state"
    with pytest.raises(BatchError, match=r"state group .state. of the target has the backend .*Reference"):
        make_groups({"state": get("torch_reference")})


def test_states_beyond_the_memory_are_refused():
    with pytest.raises(
        CachesTooLarge, match="group target state needs the states of 1099511627776 requests in 2 layers"
    ):
        make_groups(slots=1 << 40)


@pytest.mark.parametrize("spec", [SPEC, CONV], ids=lambda spec: spec.recurrence.value)
def test_slots_take_what_the_message_says(spec):
    [cache] = get_state("torch_state").allocate_state(spec, 1, 1, CPU)
    parts = (cache.state, cache.conv, cache.key, cache.update, cache.decay)
    assert bytes_of_slot(spec) == sum(part.numel() * part.itemsize for part in parts)
