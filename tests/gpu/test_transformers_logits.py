"""Models of `transformers` over paged attention, compared with that library.

Random models of each kind, on every backend that supports all of their groups, through prefill, chunked prefill,
decoding and verification. A logit's error has a budget: twice the error of the library's own eager attention in the
model's dtype, plus a band for rounding, both against the same weights in fp64. Then the engine decodes greedily, with
and without graphs: plainly, with a random draft, and with the target as its own draft. Each token must be the fp64
model's argmax or within its budget, so texts can differ only at near ties; how many differ from plain decoding is
counted. With itself as the draft, the target must keep most tokens.

A backend that refuses a group, and a model that cannot be built with the installed version, are rows with the reason.
"""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from typing import Any, cast

import pytest
import torch

from attn_backends import AttentionBackend, registry
from attn_backends.torch_reference import TorchReference
from spec_decode import models
from spec_decode.engine import Engine, Request
from spec_decode.model_api import DraftInputs, DraftModel, LayerGroup
from spec_decode.models import EagleDraft, ModelConfig
from spec_decode.paged import GraphMode
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import build_ragged, make_group
from tests.factories import engine_config, make_request, make_tables

transformers = pytest.importorskip("transformers")

SCHEMA = "attn-transformers-logits/2"
JOBS = 8
"""Processes; most of the time goes into compiling kernels."""
PAGE, VOCAB, LENGTH, WINDOW, DRAFT_TOKENS, NEW_TOKENS = 16, 256, 96, 24, 3, 24
MODES = {f"speculation_{mode.value}": mode for mode in (GraphMode.NONE, GraphMode.FULL)}
SELF_ACCEPTED = 2.0
"""Tokens a round that a target must keep at least of its own draft's; without near ties they would be 2.8."""
BANDS = {torch.bfloat16: 1, torch.float32: 64}
"""Roundings of the largest logit by dtype, in units of its eps: fp32's own error may be small by luck."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    # So large that attention is sharp and a wrong mask, scale or sink shows; larger, and bf16's own error hides it.
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Every token goes to every expert: which ones it goes to flips at near ties, by far more than attention's roundings.
MOE = {"num_local_experts": 4, "num_experts_per_tok": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}),
    "qwen3": ("Qwen3Config", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}),
    "gpt_oss": (
        "GptOssConfig",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "sliding_window": WINDOW, **MOE},
    ),
}

PREFILL = [(40, 17, 64)]
PHASES = {
    "prefill": ([], [(LENGTH, 33, 1)]),
    "chunked_prefill": ([], [(19, 1, 33), (32, 16, 5), (1, 40, 17)]),
    "decode": (PREFILL, [(1, 1, 1)] * 16),
    "verify": (PREFILL, [(1 + DRAFT_TOKENS,) * 3] * 6),
}
"""Query lengths of the three texts at each step: those that only fill the caches, then those that are compared."""


@dataclass(frozen=True, kw_only=True)
class ModelUnderTest:
    """A model in one dtype: the library's own, and its fp64 reference. texts int64 [3, LENGTH]."""

    dtype: torch.dtype
    own: Any
    texts: torch.Tensor

    @classmethod
    def make(cls, kind: str, dtype: torch.dtype, device: torch.device) -> ModelUnderTest:
        """A random model; whatever the installed library raises comes through."""
        name, fields = MODELS[kind]
        config = getattr(transformers, name)(**SIZES, **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            own = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            texts = torch.randint(0, VOCAB, (len(PREFILL[0]), LENGTH))
            for name, parameter in own.named_parameters():
                if name.endswith("sinks"):
                    parameter.data.normal_()
        # Of the library's ways to run experts, this one knows every dtype and reads nothing on the host.
        _set_experts(own, "batched_mm")
        # The parameters alone: the library keeps tables of its own in fp32.
        for parameter in own.parameters():
            parameter.data = parameter.data.to(dtype)
        return cls(dtype=dtype, own=own.eval().to(device), texts=texts.to(device))

    @cached_property
    def exact(self) -> Any:
        """The same weights in fp64, as far as the library computes in it."""
        model = copy.deepcopy(self.own).double()
        _set_experts(model, "eager")
        return model

    @cached_property
    def target(self) -> models.TransformersTarget:
        """The same weights over paged attention."""
        return models.TransformersTarget(copy.deepcopy(self.own))

    @cached_property
    @torch.no_grad()
    def exact_logits(self) -> torch.Tensor:
        """The exact logits fp64 [3, LENGTH, VOCAB] of the texts."""
        logits: torch.Tensor = self.exact(self.texts).logits.double()
        return logits

    @cached_property
    @torch.no_grad()
    def budget(self) -> float:
        """What a logit may be off by."""
        own = (self.own(self.texts).logits.double() - self.exact_logits).abs().max()
        band = BANDS[self.dtype] * torch.finfo(self.dtype).eps * self.exact_logits.abs().max()
        return float(2 * own + band)

    @property
    def device(self) -> torch.device:
        return self.texts.device


def _set_experts(model: Any, way: str) -> None:
    # Before its version 5 the library has one way only.
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(way)


class Paged:
    """A subject's three texts in the pages of one backend."""

    def __init__(self, subject: ModelUnderTest, backend: AttentionBackend) -> None:
        self._subject = subject
        described = subject.target.layer_groups(PAGE)
        rows, sizes, device = len(subject.texts), [PAGE] * len(described), subject.device
        self._tables = make_tables([LENGTH] * rows, page_sizes=sizes, max_seq_len=LENGTH, device=device)
        self._groups = [
            make_group(group.name, backend, group.spec, group.layers, num_pages=rows * LENGTH // PAGE, device=device)
            for group in described
        ]
        self._done = [0] * rows

    def step(self, lens: Sequence[int]) -> float:
        """Run the next lens[r] tokens of each text r; the largest error of a logit."""
        starts, self._done = self._done, [start + count for start, count in zip(self._done, lens, strict=True)]
        batch, metadata = build_ragged(self._groups, self._tables, lens, self._done)
        ends = list(zip(starts, self._done, strict=True))
        texts, target = self._subject.texts, self._subject.target
        tokens = torch.cat([texts[r, start:end] for r, (start, end) in enumerate(ends)])
        logits = target.logits(target(tokens, batch.positions, PagedAttention(self._groups, metadata)).hidden)
        wanted = torch.cat([self._subject.exact_logits[r, start:end] for r, (start, end) in enumerate(ends)])
        return worst(logits.double() - wanted)


def worst(errors: torch.Tensor) -> float:
    """The largest magnitude; infinite where anything is not a number."""
    return float(errors.abs().nan_to_num(nan=torch.inf).max())


@torch.no_grad()
def phase_row(subject: ModelUnderTest, backend: AttentionBackend, phase: str) -> dict[str, Any]:
    """The largest error of a logit in one phase."""
    before, compared = PHASES[phase]
    paged = Paged(subject, backend)
    for lens in before:
        paged.step(lens)
    error = max(paged.step(lens) for lens in compared)
    return {"error": error, "budget": subject.budget, "ok": error <= subject.budget}


def random_draft(subject: ModelUnderTest) -> EagleDraft:
    """A random draft with the heads of the target, but neither windows nor sinks."""
    spec = subject.target.layer_groups(PAGE)[0].spec
    heads = {name: getattr(spec, name) for name in ("num_q_heads", "num_kv_heads", "head_dim")}
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    config = ModelConfig(**sizes, **heads, num_layers=1, max_positions=SIZES["max_position_embeddings"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        # It reads the target's embedding and output projection, which any target has.
        draft = EagleDraft(config, cast(Any, subject.target))
    for parameter in draft.parameters():
        parameter.data = parameter.data.to(subject.dtype)
    return draft.to(subject.device).eval().requires_grad_(False)


class TargetAsDraft(DraftModel):
    """A draft that is right up to roundings, wherever its positions, its pages and its attention are."""

    position_offset = 1

    def __init__(self, target: models.TransformersTarget) -> None:
        super().__init__()
        self.target = target
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        self.hidden_size = self.target_states_size = target.hidden_size

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """The target's."""
        return self.target.layer_groups(page_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's."""
        return self.target.logits(hidden)

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """The target's states; those handed over are not read."""
        states: torch.Tensor = self.target(inputs.token_ids, inputs.positions, inputs.attention).hidden
        return inputs.kept(states)


def speculation_row(subject: ModelUnderTest, backend: AttentionBackend, mode: GraphMode) -> dict[str, Any]:
    """Greedy texts in one graph mode: plain, with a random draft and with the target as its own draft."""
    rows = subject.texts.tolist()
    requests = [make_request(prompt=row[: 5 + 9 * i], max_tokens=NEW_TOKENS) for i, row in enumerate(rows * 2)]
    plain = _engine(subject, None, backend, mode).generate(requests)
    runs, accepted, strategies = [plain], [], []
    for draft in (random_draft(subject), TargetAsDraft(subject.target)):
        engine = _engine(subject, draft, backend, mode)
        runs.append(engine.generate(requests))
        accepted.append(round(engine.stats.mean_accepted, 3))
        strategies.append(engine.plan.strategy.value if engine.plan else "-")
    off = max(regret(subject, r, g.token_ids) for run in runs for r, g in zip(requests, run, strict=True))
    return {
        "error": off,
        "budget": subject.budget,
        "ok": off <= subject.budget and accepted[1] >= SELF_ACCEPTED,
        "strategies": strategies,
        "texts": 2 * len(requests),
        "different_at_near_ties": sum(
            ours.token_ids != theirs.token_ids for run in runs[1:] for ours, theirs in zip(run, plain, strict=True)
        ),
        "accepted_of_random_draft": accepted[0],
        "accepted_of_target_as_draft": accepted[1],
    }


def _engine(subject: ModelUnderTest, draft: DraftModel | None, backend: AttentionBackend, mode: GraphMode) -> Engine:
    config = engine_config(
        num_speculative_tokens=DRAFT_TOKENS if draft else 0,
        graph_mode=mode,
        max_num_seqs=4,
        max_model_len=LENGTH,
        page_size=PAGE,
    )
    return Engine(subject.target, draft, backend, config)


@torch.no_grad()
def regret(subject: ModelUnderTest, request: Request, tokens: Sequence[int]) -> float:
    """By how much the exact model's logit of any token of the text falls short of its largest."""
    if len(tokens) != request.sampling.max_tokens:
        return float("inf")
    text = torch.tensor([[*request.prompt, *tokens]], device=subject.device)
    logits = subject.exact(text).logits[0, len(request.prompt) - 1 : -1].double()
    chosen = logits.gather(1, text[0, len(request.prompt) :, None])[:, 0]
    return worst(logits.amax(-1) - chosen)


def refusals(subject: ModelUnderTest, name: str) -> list[str]:
    """Every reason of a backend against a group of the model or of its draft."""
    device, groups = subject.device, subject.target.layer_groups(PAGE)
    groups += random_draft(subject).layer_groups(PAGE)
    verdicts = [(group.name, registry.explain(name, group.spec, device)) for group in groups]
    return [f"{group}: {reason}" for group, verdict in verdicts for reason in getattr(verdict, "reasons", ())]


@cache
def subject_of(kind: str, dtype: torch.dtype, device: torch.device) -> ModelUnderTest:
    """The model, made once in a process with its exact logits, for all backends that it is run on there."""
    return ModelUnderTest.make(kind, dtype, device)


def rows_of(part: tuple[str, torch.dtype, str], device: torch.device) -> list[dict[str, Any]]:
    """A row for each phase of one model in one dtype on one backend, or one that says why there are none."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kind, dtype, name = part
    head = {"model": kind, "dtype": str(dtype).removeprefix("torch."), "backend": name}
    rows: list[dict[str, Any]] = []
    try:
        subject = subject_of(kind, dtype, device)
        if reasons := refusals(subject, name):
            return [{**head, "phase": "-", "ok": True, "refused": reasons}]
        for phase in (*PHASES, *MODES):
            row = partial(speculation_row, mode=MODES[phase]) if phase in MODES else partial(phase_row, phase=phase)
            began = time.monotonic()
            found = row(subject, registry.get(name))
            rows.append({**head, "phase": phase, **found, "seconds": round(time.monotonic() - began, 1)})
    except Exception as error:  # of any class, the library's own too: the other parts still count
        rows.append({**head, "phase": "-", "ok": False, "failed": f"{type(error).__name__}: {error}"})
    return rows


def compare(
    names: Sequence[str], device: torch.device, pool: Executor, write: Callable[..., None]
) -> list[dict[str, Any]]:
    """The rows of all models and dtypes on these backends, written as they come: a run that is cut off says so."""
    tasks = [pool.submit(rows_of, part, device) for part in product(MODELS, BANDS, names)]
    rows: list[dict[str, Any]] = []
    for done, task in enumerate(as_completed(tasks), start=1):
        rows += task.result()
        write(SCHEMA, transformers=transformers.__version__, finished=done == len(tasks), rows=rows)
    return rows


def problems_of(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Rows that are not ok; all of them if every backend refuses, since nothing is then shown to be right."""
    return [row for row in rows if not row["ok"]] or [row for row in rows if all("refused" in row for row in rows)]


@pytest.mark.gpu
def test_every_model_matches_transformers_logits(write_report):
    with ProcessPoolExecutor(JOBS, multiprocessing.get_context("spawn")) as pool:
        assert not problems_of(compare(registry.names(), torch.device("cuda"), pool, write_report))


# On a CPU, small: it passes what is right and fails what is not.

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(request, monkeypatch):
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setitem(SIZES, "num_hidden_layers", 2)
        monkeypatch.setitem(SIZES, "intermediate_size", 32)
        monkeypatch.setattr(f"{__name__}.NEW_TOKENS", 9)


@cache
def subject(dtype):
    return ModelUnderTest.make("gpt_oss", dtype, CPU)


def test_model_has_row_per_phase_or_reasons():
    rows = rows_of(("gpt_oss", torch.float32, "torch_reference"), CPU)
    refused = rows_of(("gpt_oss", torch.float32, "triton_mla"), CPU)
    assert [row["phase"] for row in rows] == [*PHASES, *MODES]
    assert all(row["ok"] and row["error"] <= row["budget"] and row["seconds"] >= 0 for row in rows)
    assert any(reason.startswith("sliding: ") for reason in refused[0]["refused"])
    assert not problems_of(rows + refused) and problems_of(refused) == refused


class WrongScale(TorchReference):
    def forward(self, query, cache, metadata, *, spec, sinks=None):
        return super().forward(query, cache, metadata, spec=replace(spec, scale=1.25 * spec.scale), sinks=sinks)


class OthersSinks(TorchReference):
    def forward(self, query, cache, metadata, *, spec, sinks=None):
        return super().forward(query, cache, metadata, spec=spec, sinks=sinks.flip(0))


class ShortWindow(TorchReference):
    class builder(TorchReference.builder):
        def build(self, batch, *, horizon=0):
            metadata = super().build(batch, horizon=horizon)
            if self.spec.sliding_window:
                metadata.kv_start.add_(1).clamp_(max=metadata.kv_end - 1)
            return metadata


class Nan(TorchReference):
    def forward(self, *args, **options):
        return super().forward(*args, **options) * torch.nan


@pytest.mark.parametrize("broken", [WrongScale, OthersSinks, ShortWindow, Nan])
def test_small_error_in_bfloat16_exceeds_budget(broken):
    right = phase_row(subject(torch.bfloat16), TorchReference(), "verify")
    wrong = phase_row(subject(torch.bfloat16), broken(), "verify")
    assert right["ok"] and not wrong["ok"] and wrong["error"] > 2 * wrong["budget"]


def test_draft_at_wrong_positions_is_not_ok(monkeypatch):
    monkeypatch.setattr(TargetAsDraft, "position_offset", 0)
    row = speculation_row(subject(torch.float32), TorchReference(), GraphMode.NONE)
    assert row["error"] <= row["budget"] and not row["ok"] and row["accepted_of_target_as_draft"] < 1


def test_unlikely_token_exceeds_budget():
    model, request = subject(torch.float32), make_request(prompt=[1, 2, 3], max_tokens=1)
    logits = model.exact(torch.tensor([[1, 2, 3]])).logits[0, -1]
    assert regret(model, request, [int(logits.argmax())]) == 0
    assert regret(model, request, [int(logits.topk(2).indices[1])]) > model.budget
    assert regret(model, request, []) == float("inf")


def test_model_that_cannot_be_built_has_error_row(monkeypatch):
    monkeypatch.setitem(MODELS, "none_such", ("NoSuchConfig", {}))
    [row] = rows_of(("none_such", torch.float32, "torch_reference"), CPU)
    assert problems_of([row]) == [row] and "NoSuchConfig" in row["failed"]


def test_report_has_rows_of_all_parts_and_finishes(monkeypatch):
    written = []
    monkeypatch.setattr(f"{__name__}.MODELS", {"llama": MODELS["llama"]})
    with ThreadPoolExecutor(1) as pool:
        write = lambda schema, *, finished, rows, **_: written.append((finished, len(rows)))  # noqa: E731
        rows = compare(["triton_mla"], CPU, pool, write)
    assert written == [(False, 1), (True, 2)] and {row["dtype"] for row in rows} == {"bfloat16", "float32"}
