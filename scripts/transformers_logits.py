"""Compare models of `transformers` over paged attention with that library itself: python scripts/transformers_logits.py
--json FILE.

Random models of each kind, on every backend that serves all of their groups, through prefill, prefill in chunks,
decoding and verification. A logit may be off by a budget: twice what the library's own eager attention is off by in the
model's dtype, and a band for roundings, both against the same weights in fp64. Then the engine decodes greedily, with
and without graphs: plainly, with a random draft and with the target as its own draft. Each token must be the fp64
model's argmax or lie within the budget of it, so that texts can differ at near ties alone; how many differ from
plain decoding's is counted. Of its own draft the target must keep most.

A backend that refuses a group, and a model that cannot be built with the installed version, are rows with the reason. A
model, a dtype and a backend are a task for one of several processes.
"""

from __future__ import annotations

import copy
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from attn_backends import AttentionBackend, registry
from builders import RequestTables
from scripts.script_report import script_options, write_report
from spec_decode.drafter import GraphMode
from spec_decode.drafter.attention import PagedAttention
from spec_decode.drafter.kv_groups import build_ragged, make_group
from spec_decode.engine import Engine, EngineConfig, Request
from spec_decode.models import Attention, DraftModel, EagleDraft, LayerGroup, ModelConfig
from spec_decode.models.hf.target import TransformersTarget

SCHEMA = "attn-transformers-logits/2"
PAGE, VOCAB, LENGTH, WINDOW, DRAFT_TOKENS, NEW_TOKENS = 16, 256, 96, 24, 3, 24
SELF_ACCEPTED = 2.0
"""Tokens a round that a target must keep at least of its own draft's; without near ties they would be 2.8."""
BANDS = {torch.float32: 64, torch.bfloat16: 1}
"""Roundings of the largest logit, in units of the dtype's eps: fp32's own error may be small by luck."""

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

    kind: str
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
        return cls(kind=kind, dtype=dtype, own=own.eval().to(device), texts=texts.to(device))

    @cached_property
    def exact(self) -> Any:
        """The same weights in fp64, as far as the library computes in it."""
        model = copy.deepcopy(self.own).double()
        _set_experts(model, "eager")
        return model

    @cached_property
    def target(self) -> TransformersTarget:
        """The same weights over paged attention."""
        return TransformersTarget(copy.deepcopy(self.own))

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
        rows, columns = len(subject.texts), LENGTH // PAGE
        pages = random.Random(3).sample(range(rows * columns), rows * columns)
        self._tables = RequestTables(
            page_sizes=[PAGE] * len(described),
            num_pages=[len(pages)] * len(described),
            max_reqs=rows,
            max_seq_len=LENGTH,
            device=subject.device,
        )
        owned = [pages[row * columns : (row + 1) * columns] for row in range(rows)]
        self._tables.load([owned] * len(described), [LENGTH] * rows)
        self._groups = [
            make_group(group.name, backend, group.spec, group.layers, num_pages=len(pages), device=subject.device)
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
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=SIZES["hidden_size"],
        intermediate_size=SIZES["intermediate_size"],
        num_layers=1,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_positions=SIZES["max_position_embeddings"],
    )
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

    def __init__(self, target: TransformersTarget) -> None:
        super().__init__()
        self.target = target
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        self.hidden_size = self.target_states_size = target.hidden_size

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """The target's."""
        return self.target.layer_groups(page_size)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """The target's states; those handed over are not read."""
        states: torch.Tensor = self.target(token_ids, positions, attention).hidden
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's."""
        return self.target.logits(hidden)


def speculation_row(subject: ModelUnderTest, backend: AttentionBackend, mode: GraphMode) -> dict[str, Any]:
    """Greedy texts in one graph mode: plain, with a random draft and with the target as its own draft."""
    rows = subject.texts.tolist()
    requests = [Request(prompt=row[: 5 + 9 * i], max_new_tokens=NEW_TOKENS) for i, row in enumerate(rows * 2)]
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
    # Measuring which strategy is the fastest would take longer than the run.
    config = EngineConfig(
        num_speculative_tokens=DRAFT_TOKENS if draft else 0,
        graph_mode=mode,
        autotune=False,
        max_reqs=4,
        max_seq_len=LENGTH,
        page_size=PAGE,
    )
    return Engine(subject.target, draft, backend, config)


@torch.no_grad()
def regret(subject: ModelUnderTest, request: Request, tokens: Sequence[int]) -> float:
    """By how much the exact model's logit of any token of the text falls short of its largest."""
    if len(tokens) != request.max_new_tokens:
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
    subject = ModelUnderTest.make(kind, dtype, device)
    subject.target  # noqa: B018 - made here, where a failure is the model's and no backend's
    return subject


def rows_of(kind: str, dtype: torch.dtype, device: torch.device, name: str) -> list[dict[str, Any]]:
    """A row for each phase of one model in one dtype on one backend, or one that says why there are none."""
    head = {"model": kind, "dtype": str(dtype).removeprefix("torch.")}
    try:
        subject = subject_of(kind, dtype, device)
    except Exception as error:  # the library's own, of any class: the other models still count
        return [{**head, "backend": "-", "phase": "build", **_failed(error)}]
    head["backend"] = name
    if reasons := refusals(subject, name):
        return [{**head, "phase": "-", "ok": True, "refused": reasons}]
    jobs = jobs_of(subject, registry.get(name))
    return [{**head, "phase": phase, **_timed(job)} for phase, job in jobs.items()]


def _timed(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the job finds, and the seconds that it took."""
    began = time.monotonic()
    try:
        found = job()
    except Exception as error:  # one row fails, the others are still wanted
        found = _failed(error)
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def jobs_of(subject: ModelUnderTest, backend: AttentionBackend) -> dict[str, Callable[[], dict[str, Any]]]:
    """What makes the rest of each row, by its phase."""
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        phase: partial(phase_row, subject, backend, phase) for phase in PHASES
    }
    modes = (GraphMode.NONE, GraphMode.FULL)
    return jobs | {f"speculation_{mode.value}": partial(speculation_row, subject, backend, mode) for mode in modes}


def _failed(error: Exception) -> dict[str, Any]:
    return {"ok": False, "failed": f"{type(error).__name__}: {error}"}


def _part(part: tuple[str, torch.dtype, str], device: torch.device) -> list[dict[str, Any]]:
    """The rows of a model, a dtype and a backend, in a process of the pool."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kind, dtype, name = part
    return rows_of(kind, dtype, device, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, write the report, and fail if any row is not ok."""
    parser = script_options(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", nargs="+", default=registry.names())
    parser.add_argument("--jobs", type=int, default=8, help="processes; most of the time goes into compiling kernels")
    flags = parser.parse_args(argv)
    parts = list(product(flags.models, (torch.bfloat16, torch.float32), flags.backends))
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with ProcessPoolExecutor(min(flags.jobs, len(parts)), multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(_part, part, flags.device) for part in parts]
        for done, task in enumerate(as_completed(tasks), start=1):
            new = [row for row in task.result() if row not in rows]  # a model that cannot be built is one row
            rows += new
            for row in new:
                print(f"{time.monotonic() - began:5.0f} s", *row.values(), flush=True)
            # As it stands, for a run that is cut off: it says then that it was.
            content = {"transformers": transformers.__version__, "finished": done == len(parts), "rows": rows}
            write_report(flags.json, SCHEMA, flags.device, ["scripts.transformers_logits"], **content)
    if not all(row["ok"] for row in rows) or all("refused" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
