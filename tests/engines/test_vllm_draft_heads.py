"""Drafts inside vLLM that read their head with our kernel: which tokens they draft, and what is refused.

Needs vLLM's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for vLLM's own Triton kernels.
"""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attn_backends.engines import vllm as plug_in
from attn_backends.engines.vllm.head_choice import HeadChoice
from attn_backends.engines.vllm.names import DRAFT_HEAD, PLAIN, ROUNDED
from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from scripts import vllm_arm
from tests.engines.vllm_runner import DIM, HEADS, KV_HEADS, LATENT, NEEDS_VLLM, PAGED, default_dtype

pytestmark = NEEDS_VLLM
HIDDEN, VOCAB = 64, 200
KEPT = [3, 150, 7, 199, 12]
EAGLE, MTP, DFLASH = "EagleLlamaForCausalLM", "DeepSeekMTPModel", "DFlashDraftModel"
EAGLE3 = ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM")
ROWS = [*((name, None) for name in (EAGLE, *EAGLE3, DFLASH, MTP)), *((name, 48) for name in (*EAGLE3, DFLASH))]
"""Architectures that are served, and tokens of a vocabulary of their own."""
SIZES = {
    "tiny": (HIDDEN, 96, HEADS, KV_HEADS, DIM, VOCAB, 2),
    "qwen3-tiny": (HIDDEN, 96, HEADS, KV_HEADS, DIM, VOCAB, 8),
    "deepseek-tiny": (HIDDEN, 96, HEADS, HEADS, 64, VOCAB, 4),
}
MODELS = "vllm.model_executor.models"


@pytest.fixture
def heads(vllm_inside):
    module = importlib.import_module("attn_backends.engines.vllm.draft_heads")
    yield module
    module.LM_HEAD_METHODS.pop(module.COPY, None)
    if "choice" in vars(module.TopTokensDraft):
        del module.TopTokensDraft.choice


def theirs(architecture):
    """vLLM's class for an architecture."""
    module, title = importlib.import_module(f"{MODELS}.registry")._SPECULATIVE_DECODING_MODELS[architecture]
    return getattr(importlib.import_module(f"{MODELS}.{module}"), title)


@pytest.fixture
def configure(one_process, monkeypatch, tmp_path):
    """Make vLLM's configuration of a tiny target and a draft, as the figures' arms do. own: tokens of the draft's own
    vocabulary; changes: of --speculative-config, which None replaces by nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.runner import shared_experts
    from vllm.model_executor.models import deepseek_v2, llama, qwen3
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setattr(vllm_arm, "SIZES", SIZES)
    monkeypatch.setitem(vllm_arm.EXPERT_WIDTH, "deepseek-tiny", 16)
    monkeypatch.setattr(shared_experts, "aux_stream", lambda: None)
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    for target in (llama.LlamaForCausalLM, qwen3.Qwen3ForCausalLM, deepseek_v2.DeepseekV3ForCausalLM):
        ModelRegistry.register_model(target.__name__, target)

    def make(architecture=EAGLE, own=None, *, options=None, **changes):
        size = "deepseek-tiny" if architecture == MTP else "tiny" if "Llama" in architecture else "qwen3-tiny"
        kind = {MTP: "mtp", "DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}.get(architecture, "eagle")
        ModelRegistry.register_model(architecture, theirs(architecture))
        made = vllm_arm.engine_options(vllm_arm.Arm((LATENT if kind == "mtp" else PAGED)[0], 3, size, kind=kind))
        speculation = made["speculative_config"]
        if kind != "mtp":
            named = json.loads(Path(speculation["model"], "config.json").read_text())
            named |= {"architectures": [architecture]} | ({"draft_vocab_size": own} if own else {})
            (tmp_path / "config.json").write_text(json.dumps(named))
            speculation["model"] = str(tmp_path)
        if "agle3" in architecture:
            speculation["method"] = "eagle3"
        speculation |= {"use_local_argmax_reduction": True} | changes
        made["speculative_config"] = None if changes.get("method", "") is None else speculation
        return EngineArgs(**made | (options or {})).create_engine_config()

    with torch.no_grad():
        yield make


@pytest.fixture
def config(configure):
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(made := configure()):
        yield made


def randomise(weight, tokens, seed):
    """Padding would win if it counted."""
    weight.data.fill_(10)
    weight.data[:tokens] = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))[: len(weight)]


def make_head(vocab=VOCAB, seed=0, **options):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    with default_dtype(torch.bfloat16):
        head = ParallelLMHead(vocab, HIDDEN, prefix="head", **options)
    randomise(head.weight, vocab, seed)
    return head


def states(rows):
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()


def draft_of(heads, config, value):
    """The draft as vLLM's loader makes it, with the target's head if it has none."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    heads.register(value)
    of = config.speculative_config
    config = of.apply_draft_overrides(config)
    with set_current_vllm_config(config), default_dtype(torch.bfloat16):
        draft = initialize_model(config, model_config=of.draft_model_config, prefix="draft")
    if not hasattr(draft, "lm_head") and not isinstance(draft, theirs(MTP)):
        draft.lm_head = make_head()
    return draft


def file_of(folder, ids=KEPT, name="ids.json"):
    path = folder / name
    torch.save(torch.tensor(ids), path) if name.endswith(".pt") else path.write_text(json.dumps(ids))
    return path


def expected(x, weight, ids):
    """The most likely of these tokens, in fp64."""
    return ids[(x.double() @ weight.double().T).argmax(-1)]


def as_read(weight, value):
    return Fp8Weight.of(weight).widened(torch.float32) if value.startswith("fp8") else weight


@pytest.mark.parametrize("bits", ["16", "fp8"])
@pytest.mark.parametrize(("architecture", "own"), ROWS)
def test_each_class_of_vllms_drafts_the_most_likely_token(architecture, own, bits, heads, configure):
    draft = draft_of(heads, configure(architecture, own), bits)
    assert isinstance(draft, heads.TopTokensDraft) and isinstance(draft, theirs(architecture))
    x, seen, tokens = states(9), states(9), own or VOCAB
    if architecture == MTP:
        [layer] = draft.model.layers.values()
        layer.shared_head.norm.weight.data.copy_(torch.rand(HIDDEN) + 0.5)
        head, seen = layer.shared_head.head, layer.shared_head.norm(states(9))
    else:
        head = draft.lm_head
    randomise(head.weight, tokens, 1)
    ids = torch.arange(tokens) * 3 if own else torch.arange(tokens)
    if own:
        draft.draft_id_to_target_id.data.copy_(ids - torch.arange(own))
    assert torch.equal(draft.get_top_tokens(x), expected(seen, as_read(head.weight[:tokens], bits), ids))


@pytest.mark.parametrize("bits", ["16", "fp8"])
@pytest.mark.parametrize("name", ["", "ids.json", "ids.pt"])
def test_a_draft_proposes_only_tokens_of_the_file(bits, name, heads, config, tmp_path):
    value = f"{bits}:{file_of(tmp_path, name=name)}" if name else bits
    draft = draft_of(heads, config, value)
    ids = torch.tensor(sorted(KEPT)) if name else torch.arange(VOCAB)
    x, weight = states(40), as_read(draft.lm_head.weight[ids], value)
    assert torch.equal(draft.get_top_tokens(x), expected(x, weight, ids))
    is_shared = draft._readers[draft.lm_head].weight.data_ptr() == draft.lm_head.weight.data_ptr()
    assert is_shared is (value == "16")


@pytest.mark.outside_inference_mode
@pytest.mark.parametrize("value", ["16", "fp8", "16:FILE", "fp8:FILE"])
@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_head_follows_reloaded_weights_where_graphs_read_it(model, value, heads, config, tmp_path):
    """By what vLLM's worker and runner do after a reload."""
    from vllm.model_executor.layers.quantization.online import lm_head
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

    draft = draft_of(heads, config, value.replace("FILE", str(file_of(tmp_path))))
    ids = torch.tensor(sorted(KEPT)) if "FILE" in value else torch.arange(VOCAB)
    with torch.inference_mode():
        draft.get_top_tokens(states(3))
    reader = draft._readers[draft.lm_head]
    if model == "draft":
        lm_head.share_source_lm_heads(draft)
    randomise(draft.lm_head.weight, VOCAB, 9)
    if model == "draft":
        lm_head.restore_quantized_lm_heads(draft)
    else:
        speculator, runner = object.__new__(MTPSpeculator), object.__new__(GPUModelRunner)
        speculator.model = draft
        vars(runner).update(speculator=speculator, vllm_config=config, lora_config=None)
        runner.reset_lora_state()
    x = states(40)
    assert torch.equal(draft.get_top_tokens(x), expected(x, as_read(draft.lm_head.weight[ids], value), ids))
    assert draft._readers[draft.lm_head] is reader


@pytest.mark.parametrize("value", ["16", "fp8"])
def test_the_first_draft_compiles_for_any_number_of_rows(value, heads, config, monkeypatch):
    warm, drafted = [], []
    monkeypatch.setattr(heads, "warm_up", lambda op, product: warm.append((op, product)))
    draft, top_tokens = draft_of(heads, config, value), heads.top_tokens
    monkeypatch.setattr(heads, "top_tokens", lambda *parts: drafted.append(parts) or top_tokens(*parts))
    for count in (9, 3):
        draft.get_top_tokens(states(count))
    [(op, (x, *parts))] = warm
    assert op is heads.top_tokens
    assert (x.dtype, x.shape) == (torch.bfloat16, (0, HIDDEN))
    assert all(one is other for one, other in zip(parts, drafted[0][1:], strict=True))


def test_each_module_of_an_mtp_draft_has_its_norm_and_head(heads, config):
    class Shared(SimpleNamespace):
        def __call__(self, x):
            return x * self.factor

    class Base(torch.nn.Module):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__()
            layers = {at: Shared(head=make_head(seed=at), factor=at - 4.5) for at in (4, 5)}
            self.model = SimpleNamespace(
                layers={at: SimpleNamespace(shared_head=layer) for at, layer in layers.items()}
            )

    heads.register("fp8")
    draft = type("Draft", (heads.MtpTopTokensDraft, Base), {})(vllm_config=config)
    x, ids = states(9), torch.arange(VOCAB)
    for step in range(3):
        shared = draft.model.layers[4 + step % 2].shared_head
        weight = as_read(shared.head.weight[:VOCAB], "fp8")
        assert torch.equal(draft.get_top_tokens(x, step), expected(shared(x), weight, ids))


@pytest.mark.parametrize("value", ["16", "16:FILE"])
def test_ranks_agree_on_the_best_token(value, heads, config, monkeypatch, tmp_path):
    from vllm.model_executor.layers import vocab_parallel_embedding

    ids, whole, x = list(range(0, VOCAB, 3)), make_head().weight.data, states(30)
    value = value.replace("FILE", str(file_of(tmp_path, ids)))
    draft = draft_of(heads, config, value)
    readers = []
    for rank in (0, 1):
        monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_world_size", lambda: 2)
        monkeypatch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        head = make_head(padding_size=4)
        start = head.shard_indices.org_vocab_start_index
        head.weight.data.copy_(whole[start:][:100])
        readers.append(draft._reader(head))
    assert start == 100
    sent = []

    def gather(pair, dim):
        sent.append(pair)
        return torch.cat(sent if len(sent) == 2 else [pair, pair], dim)

    monkeypatch.setattr(heads, "tensor_model_parallel_all_gather", gather)
    _, found = [reader.top_tokens(x) for reader in readers]
    kept = torch.tensor(ids if ":" in value else range(VOCAB))
    assert torch.equal(found, expected(x, whole[kept], kept))


def test_the_variable_registers_a_subclass_for_every_architecture(heads, config, monkeypatch):
    from vllm.model_executor.models.registry import ModelRegistry

    plug_in.register()
    assert heads.__name__ not in str(ModelRegistry.models[EAGLE])
    monkeypatch.setenv(DRAFT_HEAD, "fp8")
    plug_in.register()
    assert {architecture for architecture, _ in ROWS} == {*heads.ARCHITECTURES}
    for architecture in heads.ARCHITECTURES:
        found = ModelRegistry.models[architecture].load_model_cls()
        assert found.get_top_tokens is heads.TopTokensDraft.get_top_tokens and issubclass(found, theirs(architecture))


@pytest.mark.parametrize("value", ["8", "fp16", "16:", "fp8:", ":ids.json", "FP8"])
def test_a_wrong_value_of_the_variable_is_refused(value, vllm_inside, monkeypatch):
    monkeypatch.setenv(DRAFT_HEAD, value)
    with pytest.raises(ValueError, match=rf"DRAFT_HEAD must be 16 or fp8, .* got '{value}'\. Unset it"):
        plug_in.register()


OLDER = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda capability: capability <= (8, 6))
CPU = SimpleNamespace(is_cuda=lambda: False, has_device_capability=lambda capability: True)
DRAFT = "speculative_config"


@pytest.mark.parametrize(
    ("choice", "path", "value", "reason"),
    [
        ("16", f"{DRAFT}.use_local_argmax_reduction", False, "is false, so .*tokens. Set it to true"),
        ("16", f"{DRAFT}.draft_sample_method", "probabilistic", "is probabilistic, and .*greedily. Leave it out"),
        ("16", f"{DRAFT}.draft_lm_head_quantization", "fp8", "quantization is fp8, and only one .*. Leave it out"),
        ("16", f"{DRAFT}.draft_model_config.hf_config.logit_scale", 0.0, r"logit_scale is 0.0, .* logits. Unset"),
        ("16", "model_config.dtype", torch.float32, "has torch.float32, and .*16 bits. Use --dtype bfloat16"),
        ("16", "model_config.hf_config.head_dtype", "float32", "are torch.float32, and .* Leave head_dtype out"),
        ("16", "lora_config", object(), "LoRA is on, and .* Start without --enable-lora"),
        ("16", "platform", CPU, "no CUDA GPU, and .* nothing else. Unset"),
        ("16:FILE", f"{DRAFT}.draft_model_config.hf_config.draft_vocab_size", 48, "of 48 tokens, which .*Leave the fi"),
        ("16:FILE", "model_config.enable_sleep_mode", True, "sleep mode is on, and .* Start without --enable-sleep"),
        ("fp8", "model_config.enable_sleep_mode", True, "sleep mode is on, and .* Start without --enable-sleep-mode"),
        ("fp8", "envs", False, "V2 is off, and .* reloaded. Set ATTN_BACKENDS_DRAFT_HEAD to 16"),
        ("fp8", "platform", OLDER, r"is below 8\.9, which 8-bit weights need. Set ATTN_BACKENDS_DRAFT_HEAD to 16"),
        ("16:BIG", "", None, f"has token {VOCAB}, and the target has {VOCAB} tokens. Use ids"),
        ("16", "model_config.enable_sleep_mode", True, ""),
        ("16", "envs", False, ""),
        ("16", "platform", OLDER, ""),
        ("fp8", f"{DRAFT}.draft_model_config.hf_config.draft_vocab_size", 48, ""),
        ("16:FILE", f"{DRAFT}.draft_model_config.hf_config.draft_vocab_size", VOCAB, ""),
    ],
)
def test_what_excludes_the_heads_is_refused(choice, path, value, reason, heads, config, tmp_path, monkeypatch):
    """An empty reason: it is not."""
    if path == "platform":
        monkeypatch.setattr(heads, "current_platform", value)
    elif path == "envs":
        monkeypatch.setattr(importlib.import_module("vllm.envs"), "VLLM_USE_V2_MODEL_RUNNER", value, raising=False)
    elif path:
        *places, option = path.split(".")
        monkeypatch.setattr(reduce(getattr, places, config), option, value, raising=False)
    for name, ids in (("FILE", KEPT), ("BIG", [1, VOCAB])):
        choice = choice.replace(name, str(file_of(tmp_path, ids, f"{name}.json")))
    message = f"does not serve this draft, so vLLM was not started:\n- .*{reason}.*\\.$"
    with pytest.raises(ValueError, match=message) if reason else nullcontext():
        heads.require_served(config, HeadChoice.of(choice))


def test_every_reason_has_a_line(heads, config):
    config.speculative_config.draft_sample_method, config.lora_config = "probabilistic", object()
    with pytest.raises(ValueError, match=r"started:\n- draft_sample_method .*\n- LoRA "):
        heads.require_served(config, HeadChoice.of("16"))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("EagleMistralForCausalLM", f"its architecture is EagleMistralForCausalLM, and only {EAGLE}, .* Unset ATTN"),
        ("DFlash2DraftModel", "DFlash2 chooses among several tokens of each place, and .* Unset ATTN_BACKENDS_DRAFT"),
    ],
)
def test_another_architecture_is_refused_before_weights_load(architecture, reason, configure, monkeypatch):
    configure(architecture)
    monkeypatch.setenv(DRAFT_HEAD, "16")
    with pytest.raises(ValueError, match=f"was not started:\n- {reason}"):
        configure(architecture)


@pytest.mark.parametrize("method", [None, "ngram"])
def test_without_a_draft_model_the_variable_warns(method, heads, configure, monkeypatch):
    said = []
    monkeypatch.setattr(heads, "_log", SimpleNamespace(warning=lambda text, *given: said.append(text % given)))
    monkeypatch.setenv(DRAFT_HEAD, "16")
    configure(method=method, model=None, use_local_argmax_reduction=False)
    assert said == [f"{DRAFT_HEAD} has no effect: there is no draft model. Unset it, or choose a draft."]


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_in_8_bits_or_with_a_bias_is_refused(bias, heads, one_process):
    head = make_head(bias=bias)
    if not bias:
        head.weight.data = head.weight.data.to(torch.float8_e4m3fn)
    wrong = "torch.bfloat16 and a bias" if bias else "torch.float8_e4m3fn"
    with pytest.raises(ValueError, match=f"head has weights in {wrong}; it needs 16-bit .* Leave the head unquantised"):
        heads.require_readable(head)


def test_a_rank_without_tokens_is_refused(heads, one_process):
    with pytest.raises(ValueError, match="no token from 0 to 199"):
        heads.kept(make_head(), (200, 300))


@pytest.mark.parametrize("capturing", [True, False])
def test_a_head_is_prepared_before_a_capture(capturing, heads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    weight = SimpleNamespace(dtype=torch.bfloat16, is_contiguous=lambda: True, is_cuda=True)
    with pytest.raises(RuntimeError, match="is being captured, but its head") if capturing else nullcontext():
        heads.require_readable(SimpleNamespace(weight=weight))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1, 2", "cannot be read: .* Use a JSON list of token ids, or a list or tensor saved by torch as .pt"),
        ("{}", "holds dict {}. It must hold a list of token ids"),
        ("[]", "holds list .*. It must hold a list"),
        ("[-1]", "has -1 as entry 0, which is no token id"),
        ("[5, 6, 5]", "has 5 as entry 2, which .* in the file twice. Use different ids"),
        ("[true]", "has True as entry 0, which"),
        ('[1, "2"]', "has '2' as entry 1, which"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_a_wrong_file_is_refused_even_without_a_draft(content, reason, vllm_inside, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    if content is not None:
        (tmp_path / "ids.json").write_text(content)
    monkeypatch.setenv(DRAFT_HEAD, "16:~/ids.json")
    with pytest.raises(ValueError, match=f"ATTN_BACKENDS_DRAFT_HEAD: .*{tmp_path}/ids.json.*{reason}"):
        plug_in.register()


def test_a_file_that_runs_code_is_refused_without_torchs_advice(tmp_path):
    torch.save(print, tmp_path / "ids.pt")
    with pytest.raises(ValueError, match=r"ids.pt cannot be read: UnpicklingError\. Use a JSON list"):
        HeadChoice.of(f"16:{tmp_path}/ids.pt")


@pytest.mark.parametrize("name", [PLAIN, ROUNDED])
def test_a_quantization_that_vllm_ignores_is_refused(name, configure):
    configure(EAGLE, quantization=name)
    configure(MTP, options={"quantization": name})
    with pytest.raises(ValueError, match=rf"'{name}' .* no effect on DeepSeekMTPModel, .* Leave it out, or choose it"):
        configure(MTP, quantization=name)


@pytest.mark.parametrize(("target", "draft"), [(PLAIN, None), (None, PLAIN)])
def test_a_quantization_refuses_options_before_weights_load(target, draft, configure):
    with pytest.raises(ValueError, match=r"'attn_backends' does not serve these options, .*\n- LoRA is on"):
        configure(options={"enable_lora": True, "quantization": target}, quantization=draft)


def test_vllms_classes_read_the_quantization_that_is_expected(vllm_inside):
    from vllm.model_executor.models import registry

    from attn_backends.engines.vllm.engine_config import has_targets

    root = Path(importlib.import_module("vllm").__file__).parent
    checked = 0
    for architecture, (module, _) in registry._SPECULATIVE_DECODING_MODELS.items():
        path = root.parent.joinpath(*module.split(".")) if "." in module else root / "model_executor/models" / module
        files = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else path.rglob("mtp.py")
        text = "".join(file.read_text() for file in files)
        method = "mtp" if "MTP" in architecture else "eagle" if "agle" in architecture else ""
        if method and "quant_config" in text:
            checked += 1
            assert has_targets(method, architecture) is ("get_draft_quant_config" not in text), architecture
    assert checked > 30
