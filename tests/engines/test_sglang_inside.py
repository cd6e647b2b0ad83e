"""The plug-in inside SGLang 0.5.23's own classes, as released: its hook, factory, pools and layers, on a CPU.

Needs SGLang's Python, which `make engines` unpacks.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import attn_backends
from attn_backends.engines import sglang as plug_in
from spec_decode.graphs import runtime_for
from tests.engines.released import needs
from tests.factories import CPU

pytestmark = needs("sglang", "0.5.23")
HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 2
STEPS = 4
NAME = "attn_backends_triton_paged"


@pytest.fixture(scope="module", autouse=True)
def inside():
    """SGLang, with the plug-in registered and its hook applied as SGLang's loader does."""
    from engine_kits.sglang.pictures import do_without

    do_without()
    from sglang.srt.plugins.hook_registry import HookRegistry

    plug_in.register()
    HookRegistry.apply_hooks()


class Draft(torch.nn.Module):
    """Two layers of SGLang's, the second with a window of 5 tokens."""

    def __init__(self, **changes):
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__()
        shape = {"num_heads": HEADS, "head_dim": DIM, "scaling": DIM**-0.5, "num_kv_heads": KV_HEADS, **changes}
        self.layers = torch.nn.ModuleList(
            RadixAttention(**shape, layer_id=layer, sliding_window_size=4 if layer else -1) for layer in range(LAYERS)
        )


class Engine:
    """What SGLang's draft worker has, with requests whose slots are scattered over its cache.

    lens: context tokens of each request. page_size: slots that are adjacent.
    """

    def __init__(self, lens, page_size=1, dtype=torch.float32, **changes):
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        self.page_size, self.generator = page_size, torch.Generator().manual_seed(0)
        self.requests = ReqToTokenPool(size=6, max_context_len=64, device="cpu", enable_memory_saver=False)
        self.pool = MHATokenToKVPool(
            size=512, page_size=page_size, dtype=dtype, head_num=KV_HEADS, head_dim=DIM, layer_num=LAYERS,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        translator = KVIndexTranslator(
            req_to_token=self.requests.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=self.pool,
            page_size=page_size, device="cpu", is_draft_worker=True,
        )  # fmt: skip
        self.runner = SimpleNamespace(
            device="cpu", dtype=dtype, token_to_kv_pool=self.pool, req_to_token_pool=self.requests,
            kv_index_translator=translator, model=Draft(**changes), use_mla_backend=False,
            draft_attention_backend=NAME, model_config=SimpleNamespace(hf_text_config=None, hf_config=None),
        )  # fmt: skip
        for layer in range(LAYERS):
            for buffer in (self.pool.k_buffer[layer], self.pool.v_buffer[layer]):
                buffer.copy_(torch.randn(buffer.shape, generator=self.generator))
        self.batch = SimpleNamespace(
            batch_size=len(lens), forward_mode=mode(), out_cache_loc_is_physical=False, spec_info=None,
            moe_num_token_non_padded=None,
            req_pool_indices=torch.zeros(len(lens), dtype=torch.int64),
            seq_lens=torch.zeros(len(lens), dtype=torch.int64),
            positions=torch.zeros(len(lens), dtype=torch.int64),
            out_cache_loc=torch.zeros(STEPS * len(lens), dtype=torch.int64),
        )  # fmt: skip
        self.queries = torch.zeros(STEPS - 1, LAYERS, len(lens), HEADS, DIM, dtype=dtype)
        self.new = torch.zeros(STEPS - 1, LAYERS, 2, len(lens), KV_HEADS, DIM, dtype=dtype)
        self.load(lens)

    def load(self, lens):
        """Other requests of these lengths, into the same buffers; their slots are pages in no order."""
        batch, n, pages = self.batch, len(lens), 64 // self.page_size
        order = torch.randperm(n * pages, generator=self.generator) + 1
        slots = (order[:, None] * self.page_size + torch.arange(self.page_size)).view(n, -1)
        batch.req_pool_indices.copy_(torch.randperm(6, generator=self.generator)[:n] + 1)
        self.requests.req_to_token[batch.req_pool_indices] = slots[:, :64].int()
        batch.seq_lens.copy_(torch.tensor(lens))
        batch.positions.copy_(batch.seq_lens)
        drafted = batch.seq_lens[:, None] + torch.arange(STEPS)
        self.slots = slots
        batch.out_cache_loc.copy_(slots.gather(1, drafted).T.flatten())
        for tensor in (self.queries, self.new):
            tensor.copy_(torch.randn(tensor.shape, generator=self.generator))

    def steps(self):
        """The container that SGLang's factory makes."""
        return factory(self.runner).create_decode_backend()

    def draft(self, steps):
        """What SGLang's draft worker runs for a round, attention alone: [steps, layers, rows, heads * dim]."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        batch = self.batch
        where = batch.out_cache_loc.view(STEPS, -1)
        found = []
        for step in range(STEPS - 1):
            view = SimpleNamespace(**{**vars(batch), "out_cache_loc": where[step]})
            with forward_context(ForwardContext(attn_backend=steps.attn_backends[step])):
                for i, layer in enumerate(self.runner.model.layers):
                    key, value = self.new[step, i]
                    found.append(layer(self.queries[step, i].flatten(1), key, value, view))
        return torch.stack(found).view(STEPS - 1, LAYERS, batch.batch_size, -1)

    def truth(self):
        """The same in float64, of contexts that were looked up by hand, before anything is drafted."""
        found = torch.zeros(STEPS - 1, LAYERS, self.batch.batch_size, HEADS * DIM, dtype=torch.float64)
        for row, length in enumerate(self.batch.seq_lens.tolist()):
            for i, layer in enumerate(self.runner.model.layers):
                old = self.slots[row, :length]
                for step in range(STEPS - 1):
                    drafted = self.new[: step + 1, i, :, row]
                    key = torch.cat([self.pool.k_buffer[i][old], drafted[:, 0]]).double()
                    value = torch.cat([self.pool.v_buffer[i][old], drafted[:, 1]]).double()
                    seen = layer.sliding_window_size + 1 or len(key)
                    key, value = (x[-seen:].repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
                    scores = torch.einsum("hd,thd->ht", self.queries[step, i, row].double(), key) * layer.scaling
                    found[step, i, row] = torch.einsum("ht,thd->hd", scores.softmax(-1), value).flatten()
        return found


def mode():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode.DECODE


def factory(runner, *, topk=1, num_steps=STEPS):
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    return DraftBackendFactory(runner, topk, num_steps)


@pytest.fixture(autouse=True)
def configured(monkeypatch):
    """What a started SGLang knows: the target's backends, and that nothing is parallel."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative import draft_utils

    monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("fa3", "fa3"))
    monkeypatch.setattr(draft_utils, "_assert_draft_needs_no_conv_sidecar", lambda runner: None)
    with get_parallel().override(dcp_enabled=False):
        yield


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("lens", [[9], [1, 17, 30], [5, 5, 5, 60]], ids=str)
def test_draft_steps_attend_to_context_and_drafts(lens, page_size):
    engine = Engine(lens, page_size)
    steps, expected = engine.steps(), engine.truth()
    steps.init_forward_metadata(engine.batch)
    torch.testing.assert_close(engine.draft(steps).double(), expected, atol=1e-5, rtol=1e-5)


def test_captured_round_is_right_for_other_requests():
    engine = Engine([9, 17, 30], page_size=4)
    steps = engine.steps()
    steps.init_cuda_graph_state(3, 3)
    out = torch.zeros(STEPS - 1, LAYERS, 3, HEADS * DIM)

    def run_once():
        steps.init_forward_metadata_in_graph(engine.batch)
        out.copy_(engine.draft(steps))

    steps.init_forward_metadata_out_graph(engine.batch, in_capture=True)
    run_once()
    graph = runtime_for(CPU).capture(run_once)
    for lens in ([2, 40, 7], [30, 1, 9]):
        engine.load(lens)
        expected = engine.truth()
        steps.init_forward_metadata_out_graph(engine.batch)
        graph.replay()
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_steps_container_has_sglang_interface():
    steps = Engine([3]).steps()
    assert len(steps.attn_backends) == STEPS - 1 and not steps.needs_cpu_seq_lens
    assert steps.attn_backends[0].get_cuda_graph_seq_len_fill_value() == 1
    stamps = {child.decode_attention_backend_str for child in (steps, *steps.attn_backends)}
    assert stamps == {"triton"}


def test_state_size_does_not_depend_on_steps():
    def state_size(num_steps):
        backend = factory(Engine([3]).runner, num_steps=num_steps).create_decode_backend()
        return sum(x.nbytes for x in vars(backend).values() if isinstance(x, torch.Tensor))

    assert state_size(2) == state_size(8)


def test_larger_batches_get_room_before_capture():
    steps = Engine([3]).steps()
    steps.init_cuda_graph_state(16, 16)
    assert len(steps.seq_lens) == len(steps.block_table) == 16


def test_a_batch_without_room_is_refused():
    engine = Engine([3, 4, 5])
    steps = engine.steps()
    engine.batch.batch_size = 7
    with pytest.raises(ValueError, match="tables for 6 requests, got a batch of 7"):
        steps.init_forward_metadata(engine.batch)


def test_a_step_out_of_order_is_refused():
    engine = Engine([3])
    steps = engine.steps()
    steps.init_forward_metadata(engine.batch)
    engine.draft(steps)
    with pytest.raises(ValueError, match="got step 0 after 2"):
        engine.draft(steps)


def test_layer_input_outside_spec_is_rejected():
    engine = Engine([3])
    steps = engine.steps()
    steps.init_forward_metadata(engine.batch)
    layer, (key, value) = engine.runner.model.layers[0], engine.new[0, 0]
    with pytest.raises(ValueError, match="no inputs outside its spec, got sinks"):
        steps.attn_backends[0].forward_decode(
            engine.queries[0, 0], key, value, layer, engine.batch, sinks=torch.zeros(HEADS)
        )


def test_draft_extend_backend_stays_sglangs(monkeypatch):
    extend = SimpleNamespace()
    maker = factory(Engine([3]).runner)
    monkeypatch.setattr(maker, "_create_triton_prefill_backend", lambda: ("triton", extend))
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.speculative import draft_utils

    monkeypatch.setattr(attention_registry, "attn_backend_wrapper_for_draft_extend", lambda runner, backend: backend)
    monkeypatch.setattr(draft_utils, "get_spec", lambda: SimpleNamespace(speculative_attention_mode="prefill"))
    assert maker.create_draft_extend_backend() is extend


def test_plug_in_names_are_sglang_choices():
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name, (_, theirs) in plug_in.NAMES.items():
        assert name in DRAFT_ATTENTION_BACKEND_CHOICES and ATTENTION_BACKENDS[name] is ATTENTION_BACKENDS[theirs]


def in_chunks(runner, **changes):
    runner.attention_chunk_size, runner.model = 8192, Draft(**changes)


REFUSED = {
    "a tree": (lambda runner: {"topk": 4}, "drafts chains, --speculative-eagle-topk is 4"),
    "latents": (lambda runner: setattr(runner, "use_mla_backend", True), "no latent attention"),
    "another pool": (
        lambda runner: setattr(runner, "token_to_kv_pool", SimpleNamespace(dtype=torch.float32, page_size=1)),
        "this pool is SimpleNamespace",
    ),
    "a cache of another dtype": (lambda runner: setattr(runner, "dtype", torch.bfloat16), "have the draft's dtype"),
    "another layout": (
        lambda runner: setattr(runner.token_to_kv_pool, "kv_cache_layout", "hnd"), "the layout is hnd"
    ),
    "a head that the kernel has not": (
        lambda runner: setattr(runner, "model", Draft(head_dim=40)), "must be 64 to 256, a multiple of 8, got 40"
    ),
    "layers over an encoder": (
        lambda runner: setattr(runner, "model", Draft(is_cross_attention=True)), "layer 1 attends to an encoder"
    ),
    "chunks": (lambda runner: in_chunks(runner, use_irope=True), "layer 1 attends within chunks"),
    "scores scaled by position": (
        lambda runner: setattr(runner.model.layers[1], "xai_temperature_len", 1024), "layer 1 scales .* from 1024 on"
    ),
    "another cap": (
        lambda runner: setattr(runner, "model", Draft(logit_cap=30.0, logit_capping_method="sigmoid")),
        "layer 0 caps scores by sigmoid, not tanh",
    ),
    "a backend that does not load": (
        lambda runner: setattr(runner, "draft_attention_backend", "attn_backends_flash_attn3"), "flash_attn3"
    ),
    "virtual slots": (
        lambda runner: setattr(runner.kv_index_translator, "is_translating", True), "this pool translates them"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_draft_is_rejected_with_reason(what):
    runner = Engine([3]).runner
    change, reason = REFUSED[what]
    options = change(runner) or {}
    with pytest.raises(ValueError, match=reason):
        factory(runner, **options).create_decode_backend()


def test_unsupported_device_is_rejected_with_reason(monkeypatch):
    ours = attn_backends.get("triton_paged")
    monkeypatch.setattr(type(ours), "capabilities", replace(ours.capabilities, devices=("cuda",)))
    with pytest.raises(ValueError, match="runs on cuda, not on cpu"):
        Engine([3]).steps()


def test_full_text_layers_are_served_beside_chunked_ones():
    runner = Engine([3]).runner
    in_chunks(runner)
    assert factory(runner).create_decode_backend().attn_backends
