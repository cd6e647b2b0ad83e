"""The training runs.

The target learns the next byte of real text. A draft learns the frozen target's distribution, on real text and on text
that the target wrote: over unrolled steps that feed it its own states (EAGLE-3, Li et al., 2025, section 3), or in
blocks of masks at random places (DFlash, Chen et al., 2026).
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_decode.models import EagleDraft, LlamaTarget, load_target, save_draft, save_pair
from spec_decode.models.dflash import DFlash
from spec_decode.models.pair import STORED_DTYPE
from spec_decode.testing.held_out_text import held_out_prompts
from train_pair.corpus import SPLIT_RULE, Corpus, corpus
from train_pair.drafts import Draft, make_draft
from train_pair.generation import speculate, write
from train_pair.losses import Windows, draft_loss, target_loss
from train_pair.recipe import DRAFT, FURTHER_DRAFTS, TARGET, Recipe

_Curve = list[tuple[int, float]]
"""Held-out loss by step."""

_TARGET_SETTINGS = {"target_steps", "target_lr", "target_decay", "byte_noise"}
_STEP_SETTINGS = {"unroll", "step_weight", "hidden_weight"}
_BLOCK_SETTINGS = {"blocks", "place_weight"}
"""Settings that apply only to the target, to drafts with one step per token, and to block drafts."""


def train_pair(out: Path, recipe: Recipe, device: torch.device, origin: dict[str, Any]) -> dict[str, Any]:
    """Train a target and its draft, save them in `out`, and return the record that is saved with them."""
    run = _Run(recipe, device)
    target, target_curve = run.target()
    draft = EagleDraft(DRAFT, target).to(device)
    draft_curve = run.draft(target, draft)
    curves = {"target_curve": target_curve, "draft_curve": draft_curve}
    record = {**origin, **run.record(target, draft, curves, unused=_BLOCK_SETTINGS)}
    save_pair(out, target, draft, record)
    return record


def train_draft(out: Path, name: str, recipe: Recipe, device: torch.device, origin: dict[str, Any]) -> dict[str, Any]:
    """Train a draft of FURTHER_DRAFTS on the target in `out`, save it next to the target, and return its record."""
    target = load_target(out, device=device)
    run = _Run(recipe, device)
    draft = make_draft(FURTHER_DRAFTS[name], target, device)
    curve = run.draft(target, draft)
    unused = _TARGET_SETTINGS | (_STEP_SETTINGS if isinstance(draft, DFlash) else _BLOCK_SETTINGS)
    record = {**origin, **run.record(target, draft, {"draft_curve": curve}, unused=unused)}
    save_draft(out, name, draft, record)
    return record


class _Run:
    """The seed, the clock and the text of one training run."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.started = time.perf_counter()
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.text, self.length = corpus(), recipe.window + 1
        self.train, held_out = Windows(self.text.train, device), Windows(self.text.held_out, device)
        self.measured_on = {
            "train": self.train.every(12 * self.length, self.length),
            "held_out": held_out.every(self.length, self.length),
        }

    def target(self) -> tuple[LlamaTarget, _Curve]:
        """Train a target from scratch; returns it and its curve."""
        recipe, target = self.recipe, LlamaTarget(TARGET).to(self.device)
        return target, _fit(
            target, recipe.target_steps, recipe.target_lr, recipe.target_decay,
            lambda: target_loss(target, self.train.draw(recipe.batch, self.length), recipe.byte_noise),
            lambda: target_loss(target, self.measured_on["held_out"]),
        )  # fmt: skip

    def draft(self, target: LlamaTarget, draft: Draft) -> _Curve:
        """Train a draft of a frozen target, and return its curve."""
        recipe, batches = self.recipe, _mixed_batches(target, self.train, self.recipe)
        return _fit(
            draft, recipe.draft_steps, recipe.draft_lr, recipe.draft_decay,
            lambda: draft_loss(draft, target, batches(), recipe),
            lambda: draft_loss(draft, target, self.measured_on["held_out"], recipe),
        )  # fmt: skip

    def record(
        self, target: LlamaTarget, draft: Draft, curves: dict[str, _Curve], *, unused: set[str]
    ) -> dict[str, Any]:
        """Return the setup and the results of the run. unused: settings of the recipe that did not apply."""
        recipe, losses = self.recipe, {}
        with _measuring(self.device):
            for text, tokens in self.measured_on.items():
                losses[f"target_{text}"] = target_loss(target, tokens).item()
                losses[f"draft_{text}"] = draft_loss(draft, target, tokens, recipe).item()
        accepted, texts = speculate(target, draft, held_out_prompts(recipe.prompts, 96), recipe.rounds, 4)
        return {
            **_provenance(self.text, self.device),
            "recipe": {name: value for name, value in asdict(recipe).items() if name not in unused},
            "losses": losses,
            "accepted_of_4_per_round": accepted,
            "wall_seconds": round(time.perf_counter() - self.started, 1),
            **curves,
            "samples": texts[:: max(1, len(texts) // 4)],
        }


def _mixed_batches(target: LlamaTarget, train: Windows, recipe: Recipe) -> Callable[[], torch.Tensor]:
    """Return batches for the draft: half real text, half the target's continuations of real text."""
    device, length, real = train.bytes.device, recipe.window + 1, recipe.batch // 2
    count = min(recipe.written, recipe.batch * recipe.draft_steps)
    with _autocast(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        written = write(target, train.draw(count, 64), length, dtype)

    def draw() -> torch.Tensor:
        picks = torch.randint(count, (recipe.batch - real,), device=device)
        return torch.cat([train.draw(real, length), written[picks]])

    return draw


def _fit(
    model: nn.Module, steps: int, lr: float, decay: float,
    batch_loss: Callable[[], torch.Tensor], held_out_loss: Callable[[], torch.Tensor],
) -> _Curve:  # fmt: skip
    """Train, and return the curve. The model ends frozen at its lowest held-out loss, rounded to the stored dtype."""
    weights = list(model.parameters())
    device, curve, best = weights[0].device, [], {}
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": decay},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_cosine(step, steps))
    lowest = math.inf
    for step in range(1, steps + 1):
        with _autocast(device):
            loss = batch_loss()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 25) == 0 or step == steps:
            with _measuring(device):
                value = held_out_loss().item()
            curve.append((step, round(value, 4)))
            print(f"{type(model).__name__} {step}: train {loss.item():.4f}, held out {value:.4f}", flush=True)
            if value < lowest:
                lowest, best = value, {k: v.to(STORED_DTYPE) for k, v in model.state_dict().items()}
    model.load_state_dict(best)
    model.eval().requires_grad_(False)
    return curve


def _warm_cosine(step: int, steps: int) -> float:
    warm = max(1, min(100, steps // 10))
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def _measuring(device: torch.device) -> Iterator[None]:
    """Disable gradients and fix the random draws, so losses are comparable."""
    with torch.no_grad(), _autocast(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def _provenance(text: Corpus, device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "corpus": "pydoc_data.topics",
        "corpus_sha256": hashlib.sha256("\0".join([*text.train, "", *text.held_out]).encode()).hexdigest(),
        "train_bytes": sum(len(document.encode()) for document in text.train),
        "held_out_bytes": sum(len(document.encode()) for document in text.held_out),
        "split": SPLIT_RULE,
    }
