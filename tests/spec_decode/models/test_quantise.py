"""Drafts whose products read 8-bit weights: which weights these are, what they draft, and what is rejected."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from attn_backends import get
from attn_backends.kernels.linear.fp8_weight import Fp8Weight, widened
from benchmarks.random_drafts import BLOCK_DRAFTS, RANDOM_DRAFTS
from benchmarks.rounds import RoundConfig, TimedDraft, _verified, make_drafter
from builders import BatchError
from spec_decode.drafter import Strategy
from spec_decode.model_api import DraftModel
from spec_decode.models import SHIPPED_PAIR, dspark, load_pair, quantise_draft
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.load import load_draft
from spec_decode.models.mtp import load as load_mtp
from spec_decode.models.mtp_modules import MtpModules
from spec_decode.models.quantise import check_format
from spec_decode.models.target_head import TargetHead
from tests.benchmarks.test_bench_parallel import tiny_block
from tests.benchmarks.test_bench_random_drafts import tiny
from tests.factories import CPU
from tests.spec_decode.models.generated import ProductTarget, StubTarget, make_causal
from tests.spec_decode.models.generated_mtp import MIMO_CONFIG, QWEN_MOE_CONFIG, V3_CONFIG, make_mtp

CASES = {name: tiny(name) for name in RANDOM_DRAFTS} | {name: tiny_block(name) for name in BLOCK_DRAFTS}
_DFLASH = CASES["qwen3-8b-dflash"]
_MARKOV = {"markov_head_type": "vanilla", "markov_rank": 8}
CASES["a DSpark draft"] = replace(_DFLASH, kind=dspark, config=_DFLASH.config | _MARKOV)
V3_VOCAB = {"vocab_size": V3_CONFIG["vocab_size"]}
CHECKPOINTS = {
    "a language model": (make_causal, {}),
    "grouped heads before a mixture": (partial(make_mtp, QWEN_MOE_CONFIG), V3_VOCAB),
    "grouped heads with biases": (partial(make_mtp, MIMO_CONFIG), V3_VOCAB),
}
"""Kinds that the bench has none of: a checkpoint, and its target's sizes."""
DRAFTS = [*CASES, *CHECKPOINTS]
KEPT = {
    "embed.weight", "embed", "key_up", "value_up", "out_down", "base_kernel", "predecessor_codebook",
    "successor_codebook", "shared.gate", "markov_w1.weight",
}  # fmt: skip
"""The last parts of names of 16-bit matrices that stay so: tables, what is folded into heads, taps and gates."""


def make(name, draft_weights=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return TimedDraft.of(replace(CASES[name], dtype=dtype, draft_weights=draft_weights), CPU)


def load_from(folder, name, draft_weights=None):
    checkpoint, sizes = CHECKPOINTS[name]
    model = load_draft(checkpoint().write(folder), ProductTarget(dtype=torch.bfloat16, **sizes))
    if draft_weights is not None:
        quantise_draft(model, draft_weights)
    (group,) = model.layer_groups(16)
    return TimedDraft(model=model, spec=group.spec, context=12)


def narrow_weights(model):
    return {path: part for path, part in model.named_modules() if isinstance(part, Fp8Weight)}


def first_logits(draft, num_reqs=1):
    """Those of the first token of a round, of each request."""
    run = RoundConfig(get("torch_reference"), Strategy.EAGER, 2, num_reqs)
    drafts = make_drafter(draft, run, CPU).propose(_verified(draft, run, CPU))
    return drafts.logits[:, 0].clone()


@pytest.mark.parametrize("name", DRAFTS)
def test_every_product_of_every_draft_reads_fp8(name, tmp_path):
    load = make if name in CASES else partial(load_from, tmp_path)
    narrow, wide = load(name, "fp8"), load(name)
    weights = narrow_weights(narrow.model)
    assert weights and all(weight.values.is_contiguous() for weight in weights.values())
    left = {
        path
        for path, weight in narrow.model.named_parameters()
        if weight.dtype == torch.bfloat16 and weight.dim() > 1 and not path.endswith(tuple(KEPT))
    }
    assert not left
    before = first_logits(wide)
    for path, weight in weights.items():
        module = wide.model.get_submodule(path.rpartition(".")[0])
        place = module.shared if isinstance(module, TargetHead) else wide.model.get_parameter(path)
        assert place.dtype == torch.bfloat16 and place.shape == weight.shape
        place.data.copy_(widened(weight.values, weight.scale))
    found, wanted = first_logits(narrow), first_logits(wide)
    scored = wanted.isfinite()
    error, size = (found - wanted)[scored].abs().max(), wanted[scored].abs().max()
    assert error < 0.015 * size < (before - wanted)[scored].abs().max()


def test_target_keeps_its_head_and_draft_quantises_copy():
    target, draft = load_pair(SHIPPED_PAIR, dtype=torch.bfloat16)
    head, embedding = target.lm_head.weight, target.embed.weight
    before = head.clone(), embedding.clone()
    quantise_draft(draft)
    assert target.lm_head.weight is head and target.embed.weight is embedding
    assert torch.equal(head, before[0]) and torch.equal(embedding, before[1])
    assert torch.equal(draft.head.weight.values, Fp8Weight.of(head).values)
    hidden = torch.ones(1, target.hidden_size).bfloat16()
    assert not torch.equal(draft.logits(hidden), target.logits(hidden))


def test_prediction_modules_share_fp8_copy_of_head(tmp_path):
    config = {**V3_CONFIG, "num_nextn_predict_layers": 2}
    target = ProductTarget(vocab_size=config["vocab_size"], dtype=torch.bfloat16)
    store = TensorStore.open(make_mtp(config).write(tmp_path))
    draft = load_mtp(store, target, dtype=torch.bfloat16, device=CPU)
    assert isinstance(draft, MtpModules)
    quantise_draft(draft)
    first, second = (module.head.weight for module in draft.prediction_modules)
    assert isinstance(first, Fp8Weight) and first is second


def shipped(dtype=torch.bfloat16):
    return load_pair(SHIPPED_PAIR, dtype=dtype)[1]


class Foreign(DraftModel):
    """A draft of layers of its own."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4, dtype=torch.bfloat16)

    def layer_groups(self, page_size):
        raise NotImplementedError

    def forward(self, inputs):
        raise NotImplementedError

    def logits(self, hidden):
        raise NotImplementedError


def of_a_target_that_does_not_say(tmp_path):
    return load_draft(make_mtp(V3_CONFIG).write(tmp_path), StubTarget(**V3_VOCAB, dtype=torch.bfloat16))


REFUSED = {
    "float32": (lambda _: shipped(torch.float32), "got float32. Load them with dtype bfloat16"),
    "a target": (
        lambda _: load_pair(SHIPPED_PAIR, dtype=torch.bfloat16)[0],
        "a DraftModel, got LlamaTarget. Pass the",
    ),
    "another library's layers": (lambda _: Foreign(), "Foreign uses none of this library's linear layers"),
    "a head that is more than a product": (of_a_target_that_does_not_say, "Leave draft_weights out, or use a draft"),
}


@pytest.mark.parametrize(("draft", "why"), REFUSED.values(), ids=REFUSED)
def test_unsuitable_draft_is_rejected_unchanged(draft, why, tmp_path):
    model = draft(tmp_path)
    before = dict(model.named_parameters())
    with pytest.raises(BatchError, match=why):
        quantise_draft(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)


def test_quantising_twice_or_with_unknown_name_is_rejected():
    draft = shipped()
    with pytest.raises(BatchError, match=r"is 'f8'\. Did you mean fp8\? Pass one of fp8, or leave it out"):
        quantise_draft(draft, "f8")
    quantise_draft(draft)
    with pytest.raises(BatchError, match=r"already in 8 bits\. Quantise a loaded model once"):
        quantise_draft(draft)


def test_gpu_without_fp8_conversion_is_rejected(monkeypatch):
    capabilities = [(8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[0])
    check = partial(check_format, "draft_weights", "fp8", torch.float16, torch.device("cuda:0"))
    check()
    capabilities[0] = (9, 0)
    check()
    capabilities[0] = (8, 0)
    with pytest.raises(BatchError, match=r"needs compute capability 8\.9 or more .*, cuda:0 has 8\.0\."):
        check()
