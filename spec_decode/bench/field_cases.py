"""Rounds of the drafts that the field runs, every strategy side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from attn_backends import get
from spec_decode.bench.drafter_cases import Rebuilt
from spec_decode.bench.random_drafts import RANDOM_DRAFTS, RandomDraft
from spec_decode.bench.rounds import STEPS, WHOLE, Round, Setting, time_round
from spec_decode.bench.rows import Bench, Limit, Row, held_to
from spec_decode.models import DraftModel
from spec_decode.models.published.deepseek_v4 import DeepseekV4Prediction
from spec_decode.models.published.moe import MixtureOfExperts
from spec_decode.strategy import Strategy

_CONTEXT = 1024
_NUM_REQS = (1, 4, 16, 32)
_STEPS = (3, 7)
_FLOOR = {
    ("llama3-8b-eagle", 1): Limit("floor_ratio", 1.12),
    ("eagle-1024", 1): Limit("floor_ratio", 2.0),
}
"""What a round may take of the time to move its bytes once, by draft and number of requests."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A round, and which of its parts are timed."""

    run: Round
    parts: tuple[str, ...]


def field_rows(bench: Bench, name: str) -> Iterator[Row]:
    """Rows of one of RANDOM_DRAFTS."""
    case = RANDOM_DRAFTS[name]
    with bench.noting(name):
        model = case.make(bench.device)
        setting = _setting(case, model)
        for plan in _plans(case):
            run, names = plan.run, {part: f"{name}/{part}" for part in plan.parts}
            at = f"{run.backend.name}, {run.strategy.value}, K {run.steps}, {run.num_reqs} requests"
            with bench.noting(name, at=at):
                for row in time_round(bench, setting, model, run, names):
                    limit = _FLOOR.get((name, run.num_reqs))
                    judged = limit and run.strategy is Strategy.FULL_LOOP and row["case"].endswith(WHOLE)
                    yield held_to(row, limit) if limit and judged else row


def _setting(case: RandomDraft, model: DraftModel) -> Setting:
    (group,) = model.layer_groups(case.page_size)
    return Setting(spec=group.spec, context=_CONTEXT, weight_bytes=lambda num_reqs: weight_bytes(model, num_reqs))


def _plans(case: RandomDraft) -> Iterator[_Plan]:
    first, *others = [get(name) for name in case.backends]
    for steps, num_reqs in product(_STEPS, _NUM_REQS):
        for strategy in (Strategy.FULL_LOOP, Strategy.DEVICE_LOOP):
            yield _Plan(Round(first, strategy, steps, num_reqs), (WHOLE, STEPS))
        yield _Plan(Round(first, Strategy.FULL_LOOP, steps, num_reqs, 1.0), (WHOLE,))
        yield _Plan(Round(first, Strategy.PER_STEP, steps, num_reqs), (WHOLE,))
    for num_reqs in (_NUM_REQS[0], _NUM_REQS[-1]):
        yield _Plan(Round(first, Strategy.EAGER, _STEPS[-1], num_reqs), (WHOLE,))
        if first.name == "triton_paged":
            yield _Plan(Round(Rebuilt(), Strategy.PER_STEP, _STEPS[-1], num_reqs), (WHOLE,))
        for backend in others:
            yield _Plan(Round(backend, Strategy.FULL_LOOP, _STEPS[-1], num_reqs), (WHOLE,))


def weight_bytes(model: DraftModel, num_reqs: int) -> float:
    """Weights that a later step of so many requests reads: no embedding, nothing that step 0 alone uses, and of a
    mixture's experts as many as its tokens take if each takes any with equal chance.
    """
    unread = ("embed", "fc.") if type(model).combine is not DraftModel.combine else ("embed",)
    read = {
        name: float(p.numel() * p.element_size()) for name, p in model.named_parameters() if not name.startswith(unread)
    }
    shares = {
        f"{name}.experts.": 1 - (1 - module.routing.top_k / module.routing.num_experts) ** num_reqs
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    }
    for name in read:
        read[name] *= next((share for prefix, share in shares.items() if name.startswith(prefix)), 1.0)
    if not any(name.startswith(("lm_head", "head.")) or name == "head" for name in read):
        read["the target's head"] = model.vocab_size * _head_width(model) * next(model.parameters()).element_size()
    return sum(read.values())


def _head_width(model: DraftModel) -> int:
    """Columns of the output projection: those of the target's hidden state, of which a draft's may hold several."""
    return model.hidden_size // (model.shape.hyper.streams if isinstance(model, DeepseekV4Prediction) else 1)
