"""Models of `transformers` over paged attention, compared with the library's own eager attention over whole texts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch

from attn_backends import get
from builders import RequestTables
from spec_decode import models
from spec_decode.graphs import runtime_for
from spec_decode.model_api import AttentionInputs, TargetStates
from spec_decode.models import CheckpointError
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import KVGroup, build_ragged, make_group
from tests.factories import CPU, make_tables

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()


TEXTS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(5))
WINDOW = 6
CAP = 2.0
PAGE = 4
BACKENDS = ("torch_reference", "triton_paged")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    # Large, so that attention is sharp and a wrong mask, scale or sink shows.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": WINDOW, **MOE}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": CAP,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
}


def make_model(kind: str, **changes: Any) -> Any:
    """A random fp32 model with the library's eager attention."""
    name, fields = KINDS.get(kind, (kind, {}))
    config = getattr(transformers, name)(**{**SIZES, **fields, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@cache
def eager(kind: str) -> Any:
    return make_model(kind)


@cache
def target(kind: str) -> models.TransformersTarget:
    return models.TransformersTarget(copy.deepcopy(eager(kind)))


@cache
def exact_logits(kind: str, double: bool = True) -> torch.Tensor:
    """The library's logits [2, 24, V] of both texts, in fp64 as far as it computes in it, or in fp32."""
    model = copy.deepcopy(eager(kind)).double() if double else eager(kind)
    if double and hasattr(model, "set_experts_implementation"):
        # A grouped matrix product knows no fp64; the library's loop over experts does.
        model.set_experts_implementation("eager")
    return model(TEXTS).logits.double()


def budget(kind: str) -> float:
    """Twice what the library's own fp32 is off by, and a band for the roundings of other matrix shapes."""
    peak = float(exact_logits(kind).abs().max())
    return (
        2 * float((exact_logits(kind, False) - exact_logits(kind)).abs().max())
        + 64 * torch.finfo(torch.float32).eps * peak
    )


class Runner:
    """A target over two requests' pages."""

    def __init__(self, model: models.TransformersTarget, backend: str) -> None:
        self.model = model
        described = model.layer_groups(PAGE)
        self.tables: RequestTables = make_tables([64, 64], page_sizes=[PAGE] * len(described))
        count = 2 * 64 // PAGE
        self.groups: list[KVGroup] = [
            make_group(group.name, get(backend), group.spec, group.layers, num_pages=count, device=CPU)
            for group in described
        ]

    def logits(self, rows: Sequence[torch.Tensor], seq_lens: Sequence[int]) -> list[torch.Tensor]:
        """Logits of each request's last tokens `rows[r]`, the last of them at position seq_lens[r] - 1."""
        lens = [len(row) for row in rows]
        batch, metadata = build_ragged(self.groups, self.tables, lens, seq_lens)
        states = self.model(torch.cat(list(rows)), batch.positions, PagedAttention(self.groups, metadata))
        return list(self.model.logits(states.hidden).split(lens))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_eager_attention_of_transformers(kind: str, backend: str) -> None:
    """Of prompts in parts, of single tokens and of drafts."""
    runner, done = Runner(target(kind), backend), [0, 0]
    for lens in [(3, 9), (8, 1), (1, 1), (1, 1), (5, 5), (2, 5)]:
        ends = [start + length for start, length in zip(done, lens, strict=True)]
        rows = [TEXTS[r, done[r] : ends[r]] for r in range(2)]
        for r, logits in enumerate(runner.logits(rows, ends)):
            error = (logits.double() - exact_logits(kind)[r, done[r] : ends[r]]).abs().max()
            assert float(error) <= budget(kind), (r, ends)
        done = ends


def test_budget_detects_missing_window_or_sink() -> None:
    for field, value in (("sliding_window", 128), ("layer_types", ["full_attention"] * 4)):
        model = make_model("gpt_oss", **{field: value})
        off = (model(TEXTS).logits - exact_logits("gpt_oss")).abs().max()
        assert off > 1000 * budget("gpt_oss"), field
    model = copy.deepcopy(eager("gpt_oss"))
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    assert (model(TEXTS).logits - exact_logits("gpt_oss")).abs().max() > 1000 * budget("gpt_oss")


def test_layers_with_equal_attention_share_a_group() -> None:
    llama, sliding_and_full, gemma2 = (target(kind).layer_groups(PAGE) for kind in ("llama", "gpt_oss", "gemma2"))
    assert [(group.name, group.layers) for group in llama] == [("full", (0, 1, 2, 3))]
    assert [(g.name, g.layers) for g in sliding_and_full] == [("sliding", (0, 2)), ("full", (1, 3))]
    oss, gemma = {group.name: group.spec for group in sliding_and_full}, gemma2[0].spec
    assert (oss["sliding"].sliding_window, oss["full"].sliding_window) == (WINDOW, None)
    assert oss["full"].sinks and oss["full"].page_size == PAGE and oss["full"].softmax_scale == 64**-0.5
    assert (gemma.soft_cap, gemma.softmax_scale, gemma.sinks) == (CAP, 24**-0.5, False)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_bfloat16_error_is_close_to_transformers(kind: str) -> None:
    model = copy.deepcopy(eager(kind)).bfloat16()
    own = (model(TEXTS).logits.double() - exact_logits(kind)).abs().mean()
    runner = Runner(models.TransformersTarget(model), "triton_paged")

    found = torch.stack(runner.logits(list(TEXTS), [24, 24]))

    assert runner.groups[0].spec.dtype is torch.bfloat16
    assert float((found.double() - exact_logits(kind)).abs().mean()) <= 2 * float(own)


def replayed(runner: Runner, start: int, count: int) -> torch.Tensor:
    """Logits [2, count, V] of the texts' tokens from `start` on, by a graph that was captured over other tokens."""
    batch, metadata = build_ragged(runner.groups, runner.tables, [count] * 2, [start + count] * 2)
    tokens, out = torch.zeros(2 * count, dtype=torch.int64), torch.zeros(2 * count, 64)

    def forward() -> None:
        states = runner.model(tokens, batch.positions, PagedAttention(runner.groups, metadata))
        out.copy_(runner.model.logits(states.hidden))

    graph = runtime_for(CPU).capture(forward)
    tokens.copy_(TEXTS[:, start : start + count].flatten())
    graph.replay()
    return out.view(2, count, 64)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_a_captured_forward_replays_over_other_tokens(kind: str) -> None:
    if kind == "gpt_oss" and not hasattr(eager(kind), "set_experts_implementation"):
        pytest.skip("before its version 5 the library loops over experts on the CPU, and reads the host to do so")
    runner = Runner(target(kind), "triton_paged")
    runner.logits([TEXTS[0, :9], TEXTS[1, :9]], [9, 9])
    assert float((replayed(runner, 9, 3) - exact_logits(kind)[:, 9:12]).abs().max()) <= budget(kind)


def test_target_with_pad_token_is_captured() -> None:
    if transformers.__version__.startswith("4."):
        pytest.skip("before its version 5 the library gives GPT-2's attention no scale: refused")
    model = make_model("GPT2Config", pad_token_id=0, n_embd=64, n_head=1, n_layer=1, n_inner=48)
    wanted = model(TEXTS[:, :6]).logits
    found = replayed(Runner(models.TransformersTarget(model), "torch_reference"), 0, 6)
    assert torch.allclose(found, wanted, atol=1e-3)


def speculate(runner: Runner, prompt: list[int], plain: list[int], count: int) -> list[int]:
    """Greedy text after a prompt, from drafts whose first 0, 1, ... count tokens in turn are the plain text's."""
    idle = TEXTS[1, :1]
    text = [*prompt, int(runner.logits([torch.tensor(prompt), idle], [len(prompt), 1])[0][-1].argmax())]
    for turn in range(len(plain)):
        if len(text) >= len(prompt) + len(plain):
            break
        ahead = [*plain, *[0] * count][len(text) - len(prompt) :][:count]
        draft = [token if i < turn % (count + 1) else (token + 1) % 64 for i, token in enumerate(ahead)]
        rows = torch.tensor([text[-1], *draft])
        found = runner.logits([rows, idle], [len(text) + count, 1])[0].argmax(-1).tolist()
        kept = next((i for i in range(count) if found[i] != draft[i]), count)
        text += [*draft[:kept], found[kept]]
    return text[len(prompt) :][: len(plain)]


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_speculated_greedy_text_matches_transformers(kind: str) -> None:
    prompt = TEXTS[0, :7].tolist()
    generated = eager(kind).generate(TEXTS[:1, :7], max_new_tokens=20, do_sample=False)[0, 7:].tolist()

    assert speculate(Runner(target(kind), "triton_paged"), prompt, generated, 3) == generated


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_target_hidden_states_enter_named_layers(kind: str) -> None:
    """Those after the last layer are not yet normed."""
    model = models.TransformersTarget(copy.deepcopy(eager(kind)), aux_hidden_state_layers=(2, 0, 4))
    whole = eager(kind)(TEXTS[:1], output_hidden_states=True).hidden_states
    states = dense(model, TEXTS[0])
    *aux, last = states.target_hidden_states.chunk(3, -1)
    assert model.target_states_size == 96
    torch.testing.assert_close(torch.cat(aux), torch.cat([whole[2][0], whole[0][0]]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.model.model.norm(last), states.hidden)
    assert not torch.allclose(last, states.hidden)


def test_target_hidden_states_default_to_final_states() -> None:
    states = dense(target("llama"), TEXTS[0])
    assert states.target_hidden_states is states.hidden and target("llama").target_states_size == 32
    torch.testing.assert_close(states.hidden, eager("llama").model(TEXTS[:1]).last_hidden_state[0])


@pytest.mark.parametrize("layers", [(), (5,), (-1, 2)])
def test_missing_aux_layers_are_rejected(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"0 to 4, got \("):
        models.TransformersTarget(copy.deepcopy(eager("llama")), aux_hidden_state_layers=layers)


def dense(model: models.TransformersTarget, tokens: torch.Tensor) -> TargetStates:
    """A forward over one whole text, without pages."""
    runner = Runner(model, "torch_reference")
    batch, metadata = build_ragged(runner.groups, runner.tables, [len(tokens)], [len(tokens)])
    states: TargetStates = model(tokens, batch.positions, PagedAttention(runner.groups, metadata))
    return states


def test_a_failing_attention_leaves_no_trace() -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        target("llama")(TEXTS[0], torch.arange(24), broken)

    with pytest.raises(CheckpointError, match="was called directly"):
        target("llama").model(TEXTS[:1])


def test_nested_forward_keeps_its_own_attention() -> None:
    model, others = target("llama"), dense(target("llama"), TEXTS[1]).hidden
    runner = Runner(model, "torch_reference")
    batch, metadata = build_ragged(runner.groups, runner.tables, [24], [24])
    outer, inner = PagedAttention(runner.groups, metadata), []

    def attention(inputs: AttentionInputs) -> torch.Tensor:
        inner.append(dense(model, TEXTS[1]).hidden)
        return outer(inputs)

    hidden = model(TEXTS[0], batch.positions, attention).hidden

    torch.testing.assert_close(model.logits(hidden).double(), exact_logits("llama")[0], atol=budget("llama"), rtol=0)
    assert len(inner) == 4 and all(torch.equal(found, others) for found in inner)


def test_attention_changed_after_construction_is_rejected() -> None:
    model = models.TransformersTarget(copy.deepcopy(eager("llama")))
    model.model.model.layers[2].self_attn.scaling = 0.5
    with pytest.raises(CheckpointError, match=r"layer 2 requests .*scale=0\.5.*, and requested .* at construction"):
        dense(model, TEXTS[0])


def test_output_projection_is_given_only_for_plain_logits() -> None:
    plain, capped = (models.TransformersTarget(make_model(kind)) for kind in ("llama", "gemma2"))
    assert plain.output_projection is plain.lm_head.weight and capped.output_projection is None
    plain.lm_head.bias = torch.nn.Parameter(torch.zeros(plain.vocab_size))
    assert plain.output_projection is None


def changed(change: Callable[[Any], Any], kind: str = "llama") -> Any:
    model = copy.deepcopy(eager(kind))
    change(model)
    return model


def hand_to_attention(model: Any, **arguments: Any) -> None:
    """Layer 1 hands to the library's attention function what a layer of another architecture would."""
    attention = model.model.layers[1].self_attn
    inner, part = attention.forward, torch.zeros(1, 4, 2, 64)

    def forward(**given: Any) -> Any:
        interface = transformers.AttentionInterface()["attn_backends_paged"]
        interface(attention, part, part, part, **{"attention_mask": None, "scaling": 1.0, **arguments})
        return inner(**given)

    attention.forward = forward


def sharpen(_: Any, __: Any, out: Any) -> Any:
    out.logits = out.logits * 1.1
    return out


def make_t5() -> Any:
    sizes = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def make_deepseek_v4() -> Any:
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek-V4")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    model = object.__new__(DeepseekV4ForCausalLM)
    torch.nn.Module.__init__(model)
    model.config = transformers.DeepseekV4Config()
    return model


def make_phimoe(window: int) -> Any:
    """Its layers leave the window to the library's masks."""
    from transformers.models.phimoe import modeling_phimoe

    if not hasattr(modeling_phimoe, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("PhiMoE computes its attention itself in this transformers")
    return make_model("PhimoeConfig", sliding_window=window, **MOE)


def never_attend(model: Any) -> None:
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
UNUSUAL_ARGUMENTS: dict[str, dict[str, Any]] = {
    "adds its own mask or bias": {"attention_mask": torch.zeros(1, 1, 2, 2)},
    "requests position_bias": {"position_bias": torch.zeros(1)},
    "has no number as scaling, got None": {"scaling": None},
    "attends to later tokens": {"is_causal": False},
    "uses dropout": {"dropout": 0.1},
}
UNSERVED: dict[str, Callable[[], Any]] = {
    "BloomForCausalLM takes no position_ids": partial(make_model, "BloomConfig"),
    "MambaForCausalLM keeps state other than keys and values": partial(make_model, "MambaConfig"),
    "layer 1 of MiniMaxForCausalLM computes its linear_attention in MiniMaxLightningAttention": partial(
        make_model, "MiniMaxConfig"
    ),
    r"rotary_emb .*\(rope type dynamic\)": partial(make_model, "LlamaConfig", **DYNAMIC),
    "T5ForConditionalGeneration is an encoder-decoder": make_t5,
    r"keeps state other than keys and values .* or compressed\)": make_deepseek_v4,
    "LlamaForCausalLM does not compute its logits from the last states": partial(
        changed, lambda model: model.register_forward_hook(sharpen)
    ),
    "layer 2 called attention 2 times": partial(
        changed, lambda model: setattr(model.model.layers[3].self_attn, "layer_idx", 2)
    ),
    "layer 1 called attention 0 times": partial(changed, never_attend),
    "layer 0 is of type sliding_attention, but .* None": partial(
        changed, lambda model: setattr(model.model.layers[0].self_attn, "sliding_window", None), "gpt_oss"
    ),
    f"layer 0 requests no window, but the config has one of {WINDOW} tokens": partial(make_phimoe, WINDOW),
    **{
        rf"layer 1 \(LlamaAttention\) {problem}": partial(changed, partial(hand_to_attention, **unusual))
        for problem, unusual in UNUSUAL_ARGUMENTS.items()
    },
}


def test_window_as_wide_as_model_counts_as_none() -> None:
    model = make_phimoe(SIZES["max_position_embeddings"])
    assert [group.name for group in models.TransformersTarget(model).layer_groups(PAGE)] == ["full"]


@pytest.mark.parametrize(("reason", "make"), UNSERVED.items(), ids=UNSERVED)
def test_unsupported_model_part_is_rejected_with_reason(reason: str, make: Callable[[], Any]) -> None:
    with pytest.raises(CheckpointError, match=reason):
        models.TransformersTarget(make())
