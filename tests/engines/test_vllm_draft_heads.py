"""Drafts inside vLLM that read their head with our kernel: which tokens they draft, and what is refused.

Needs vLLM's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for vLLM's own Triton kernels.
"""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from functools import reduce
from types import SimpleNamespace

import pytest
import torch

from attn_backends.engines import vllm as plug_in
from attn_backends.engines.vllm.names import DRAFT_HEAD
from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from scripts import vllm_arm
from tests.engines.vllm_runner import DIM, HEADS, KV_HEADS, NEEDS_VLLM, PAGED, default_dtype

pytestmark = NEEDS_VLLM
HIDDEN, VOCAB = 64, 200
KEPT = [3, 150, 7, 199, 12]


@pytest.fixture
def heads(vllm_inside):
    module = importlib.import_module("attn_backends.engines.vllm.draft_heads")
    yield module
    if "choice" in vars(module.TopTokensDraft):
        del module.TopTokensDraft.choice


@pytest.fixture
def config(one_process, monkeypatch):
    """What vLLM makes of an EAGLE arm of the figures, in a tiny size, with greedy drafts."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import llama, llama_eagle
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setitem(vllm_arm.SIZES, "tiny", (HIDDEN, 96, HEADS, KV_HEADS, DIM, VOCAB, 2))
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("LlamaForCausalLM", llama.LlamaForCausalLM)
    ModelRegistry.register_model("EagleLlamaForCausalLM", llama_eagle.EagleLlamaForCausalLM)
    options = vllm_arm.engine_options(vllm_arm.Arm(PAGED[0], 3, "tiny"))
    options["speculative_config"]["use_local_argmax_reduction"] = True
    made = EngineArgs(**options).create_engine_config()
    with set_current_vllm_config(made), torch.no_grad():
        yield made


def make_head(vocab=VOCAB, seed=0):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    with default_dtype(torch.bfloat16):
        head = ParallelLMHead(vocab, HIDDEN, prefix="head")
    # Padding would win if it counted.
    head.weight.data.fill_(10)
    head.weight.data[:vocab] = torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return head


def states(rows):
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()


def eagle(heads, config, value):
    """The draft as vLLM's loader makes it, with the target's head."""
    from vllm.model_executor.model_loader.utils import initialize_model

    heads.register(value)
    with default_dtype(torch.bfloat16):
        draft = initialize_model(config, model_config=config.speculative_config.draft_model_config, prefix="draft")
    draft.lm_head = make_head()
    return draft


def expected(x, weight, ids):
    """The most likely of these tokens, in fp64."""
    return ids[(x.double() @ weight.double().T).argmax(-1)]


@pytest.mark.parametrize("bits", ["16", "fp8"])
@pytest.mark.parametrize("ending", ["", ".json", ".pt"])
def test_an_eagle_drafts_the_most_likely_token_it_may(bits, ending, heads, config, tmp_path):
    path = tmp_path / f"ids{ending}"
    if ending == ".json":
        path.write_text(json.dumps(KEPT))
    if ending == ".pt":
        torch.save(torch.tensor(KEPT), path)
    draft = eagle(heads, config, f"{bits}:{path}" if ending else bits)
    ids = torch.tensor(sorted(KEPT)) if ending else torch.arange(VOCAB)
    weight = draft.lm_head.weight[ids]
    weight = Fp8Weight.of(weight).widened(torch.float32) if bits == "fp8" else weight
    x = states(40)
    assert torch.equal(draft.get_top_tokens(x), expected(x, weight, ids))
    is_shared = draft._readers[draft.lm_head].weight.data_ptr() == draft.lm_head.weight.data_ptr()
    assert is_shared is (bits == "16" and not ending)


@pytest.mark.parametrize("value", ["16", "fp8"])
def test_the_first_draft_compiles_for_any_number_of_rows(value, heads, config, monkeypatch):
    warm, drafted = [], []
    monkeypatch.setattr(heads, "warm_up", lambda op, product: warm.append((op, product)))
    draft, top_tokens = eagle(heads, config, value), heads.top_tokens
    monkeypatch.setattr(heads, "top_tokens", lambda *parts: drafted.append(parts) or top_tokens(*parts))
    for count in (9, 3):
        draft.get_top_tokens(states(count))
    [(op, (x, *parts))] = warm
    assert op is heads.top_tokens
    assert (x.dtype, x.shape) == (torch.bfloat16, (0, HIDDEN))
    assert all(one is other for one, other in zip(parts, drafted[0][1:], strict=True))


def over(heads, base, choice="fp8", **parts):
    """A draft of a class of vLLM's, as far as its head goes, with these parts."""
    from vllm.config import get_current_vllm_config

    class Base:
        def __init__(self, *, vllm_config, prefix=""):
            vars(self).update(parts)

    heads.TopTokensDraft.choice = heads.HeadChoice.of(choice)
    return type("Draft", (base, Base), {})(vllm_config=get_current_vllm_config())


def test_a_vocabulary_of_the_drafts_own_is_mapped_to_the_targets(heads, config):
    own = make_head(64)
    targets = torch.arange(64) * 3
    draft = over(heads, heads.TopTokensDraft, lm_head=own, draft_id_to_target_id=targets - torch.arange(64))
    x, weight = states(9), Fp8Weight.of(own.weight[:64]).widened(torch.float32)
    assert torch.equal(draft.get_top_tokens(x), expected(x, weight, targets))


def test_each_module_of_an_mtp_draft_has_its_norm_and_head(heads, config):
    class Shared(SimpleNamespace):
        def __call__(self, x):
            return x * self.factor

    def layer(seed):
        return SimpleNamespace(shared_head=Shared(head=make_head(seed=seed), factor=seed - 0.5))

    layers = {"4": layer(0), "5": layer(1)}
    draft = over(heads, heads.MtpTopTokensDraft, model=SimpleNamespace(layers=layers))
    x, ids = states(9), torch.arange(VOCAB)
    for step, part in enumerate([*layers.values(), layers["4"]]):
        weight = Fp8Weight.of(part.shared_head.head.weight[:VOCAB]).widened(torch.float32)
        assert torch.equal(draft.get_top_tokens(x, step), expected(part.shared_head(x), weight, ids))


@pytest.mark.parametrize("ids", [None, tuple(range(0, VOCAB, 3))])
def test_ranks_agree_on_the_best_token(ids, heads, monkeypatch, one_process):
    whole, x = make_head().weight.data, states(30)
    readers = []
    for rank in (0, 1):
        part = SimpleNamespace(org_vocab_start_index=rank * 100, num_org_elements=100)
        head = SimpleNamespace(weight=whole[rank * 100 :][:100], shard_indices=part, tp_size=2)
        readers.append(heads.HeadReader.of(head, False, ids))
    sent = []

    def gather(pair, dim):
        sent.append(pair)
        return torch.cat(sent if len(sent) == 2 else [pair, pair], dim)

    monkeypatch.setattr(heads, "tensor_model_parallel_all_gather", gather)
    _, found = [reader.top_tokens(x) for reader in readers]
    kept = torch.tensor(ids or range(VOCAB))
    assert torch.equal(found, expected(x, whole[kept], kept))


def test_the_variable_registers_a_subclass_for_every_architecture(heads, config, monkeypatch):
    from vllm.model_executor.models.registry import ModelRegistry

    plug_in.register()
    assert heads.__name__ not in str(ModelRegistry.models["EagleLlamaForCausalLM"])
    monkeypatch.setenv(DRAFT_HEAD, "fp8")
    plug_in.register()
    for architecture, title in heads.ARCHITECTURES.items():
        found = ModelRegistry.models[architecture].load_model_cls()
        assert found.get_top_tokens is heads.TopTokensDraft.get_top_tokens and found.__name__ == title
        assert (found.scored is heads.MtpTopTokensDraft.scored) is (title == "DeepSeekMTP")


@pytest.mark.parametrize("value", ["8", "fp16", "16:", "fp8:", ":ids.json", "FP8"])
def test_a_wrong_value_of_the_variable_is_refused(value, heads, monkeypatch):
    monkeypatch.setenv(DRAFT_HEAD, value)
    with pytest.raises(ValueError, match=f"ATTN_BACKENDS_DRAFT_HEAD must be 16 or fp8, .* got '{value}'"):
        plug_in.register()


OLDER = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda capability: capability <= (8, 6))
OWN, DFLASH2 = {"draft_id_to_target_id": torch.zeros(4)}, {"compute_candidates": None}


@pytest.mark.parametrize(
    ("choice", "path", "value", "reason"),
    [
        ("16", "speculative_config.use_local_argmax_reduction", False, "set use_local_argmax_reduction to true"),
        ("16", "speculative_config.draft_sample_method", "probabilistic", "greedily; leave out draft_sample_method"),
        ("16", "speculative_config.draft_lm_head_quantization", "fp8", "leave out draft_lm_head_quantization"),
        ("16", "speculative_config.draft_model_config.hf_config.logit_scale", 0.0, "a logit_scale of 0 or less"),
        ("16", "model_config.dtype", torch.float32, "reads no torch.float32"),
        ("16", "model_config.hf_config.head_dtype", "float32", "logits are torch.float32; leave head_dtype out"),
        ("16", "lora_config", object(), "adds no LoRA adapters"),
        ("16", "parts", DFLASH2, "a DFlash2 draft selects among several"),
        ("16:FILE", "parts", OWN, "has a vocabulary of its own; leave out "),
        ("16:FILE", "model_config.enable_sleep_mode", True, "start without --enable-sleep-mode"),
        ("fp8", "model_config.enable_sleep_mode", True, "start without --enable-sleep-mode"),
        ("fp8", "platform", OLDER, r"needs compute capability 8\.9"),
        ("16", "model_config.enable_sleep_mode", True, ""),
        ("16", "platform", OLDER, ""),
        ("fp8", "parts", OWN, ""),
    ],
)
def test_what_excludes_the_heads_is_refused(choice, path, value, reason, heads, config, tmp_path, monkeypatch):
    """An empty reason: it is not."""
    (tmp_path / "FILE").write_text("[1]")
    if path == "platform":
        monkeypatch.setattr(heads, "current_platform", value)
    elif path != "parts":
        *places, option = path.split(".")
        monkeypatch.setattr(reduce(getattr, places, config), option, value, raising=False)
    failing = pytest.raises(ValueError, match=f"not serve this draft, so vLLM was not started: .*{reason}")
    with failing if reason else nullcontext():
        parts = value if path == "parts" else {}
        over(heads, heads.TopTokensDraft, choice.replace("FILE", str(tmp_path / "FILE")), **parts)


def test_a_head_in_8_bits_and_a_rank_without_tokens_are_refused(heads, one_process):
    head = make_head()
    with pytest.raises(ValueError, match="no token from 0 to 199"):
        heads.HeadReader.of(head, False, (200, 300))
    head.weight.data = head.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"needs a head with 16-bit weights, this one has torch.float8_e4m3fn"):
        heads.HeadReader.of(head, False, None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1, 2", "cannot be read as token ids"),
        ("{}", "must hold a list of token ids, got dict"),
        ("[]", "must hold a list of token ids, got list"),
        ("[1, 200]", "entry 1 of .* from 0 to 199 .* got 200"),
        ("[-1]", "entry 0 of .* got -1"),
        ("[5, 6, 5]", "entry 2 of .* once, got 5"),
        ("[true]", "entry 0 of .* got True"),
        ('[1, "2"]', "entry 1 of .* got '2'"),
        (None, "cannot be read as token ids"),
    ],
)
def test_a_file_that_does_not_fit_the_vocabulary_is_refused(content, reason, heads, config, tmp_path):
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"ATTN_BACKENDS_DRAFT_HEAD: .*{reason}"):
        over(heads, heads.TopTokensDraft, f"16:{path}")
