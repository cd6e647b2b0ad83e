"""How the shipped pair is trained, and further drafts of its target. Legend: B sequences, L positions of a window.

The target learns real bytes. A draft learns the distribution of the frozen target, on real text and on text
the target wrote, over unrolled steps that feed it its own states (EAGLE-3, Li et al., 2025, section 3).
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from spec_decode.dense import positions_of, run_target, speculate, unrolled_attend, write
from spec_decode.models import (
    EagleDraft,
    LatentConfig,
    LlamaTarget,
    ModelConfig,
    load_target,
    save_draft,
    save_pair,
)
from spec_decode.models.pair import STORED_DTYPE
from spec_decode.models.text import BOS, SPLIT_RULE, Corpus, corpus, encode, held_out_prompts

TARGET = ModelConfig(
    vocab_size=256, hidden_size=256, intermediate_size=688, num_layers=4,
    num_q_heads=4, num_kv_heads=2, head_dim=64, max_positions=2048,
)  # fmt: skip
DRAFT = replace(TARGET, num_layers=1)
FURTHER_DRAFTS = {
    # The dims and the window of DeepSeek-V4's layers: kernels made for those serve it.
    "latent_draft": replace(
        DRAFT, num_kv_heads=1, head_dim=512, sliding_window=128,
        latent=LatentConfig(rope_dim=64, q_rank=128, out_rank=128),
    ),
}  # fmt: skip
"""Drafts of the shipped target that are trained without it changing, by name."""

_Curve = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The hyperparameters of a run."""

    seed: int = 0
    target_steps: int = 1000
    draft_steps: int = 5000
    batch: int = 32
    window: int = 512
    target_lr: float = 1.5e-3
    target_decay: float = 1.0
    byte_noise: float = 0.2
    draft_lr: float = 1.5e-3
    draft_decay: float = 0.05
    written: int = 4096
    unroll: int = 4
    step_weight: float = 0.9
    hidden_weight: float = 0.1
    prompts: int = 32
    rounds: int = 32


class Windows:
    """Text on the device, from which windows are drawn without a host wait."""

    def __init__(self, documents: list[str], device: torch.device) -> None:
        self.bytes = torch.tensor([token for text in documents for token in encode(text)], device=device)

    def draw(self, count: int, length: int) -> torch.Tensor:
        """Random windows int64 [count, length]."""
        starts = torch.randint(self.bytes.numel() - length, (count,), device=self.bytes.device)
        return self._cut(starts, length)

    def every(self, stride: int, length: int) -> torch.Tensor:
        """The windows that start at each multiple of stride."""
        starts = torch.arange(0, self.bytes.numel() - length, stride, device=self.bytes.device)
        return self._cut(starts, length)

    def _cut(self, starts: torch.Tensor, length: int) -> torch.Tensor:
        windows = self.bytes[starts[:, None] + torch.arange(length, device=starts.device)]
        # An encoded prompt begins with BOS wherever in a document it was cut.
        windows[:, 0] = BOS
        return windows


def target_loss(target: LlamaTarget, tokens: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
    """Cross-entropy of the next byte; each sequence reads wrong bytes at a rate drawn from [0, noise]."""
    rate = noise * torch.rand_like(tokens[:, :1], dtype=torch.float32)
    wrong = torch.rand_like(tokens, dtype=torch.float32) < rate
    read = torch.where(wrong, tokens.flip(0, 1), tokens)
    logits = target.logits(run_target(target, read[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def draft_loss(draft: EagleDraft, target: LlamaTarget, tokens: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Distance from the target's distribution (KL) and states over unrolled steps; tokens [B, L + 1]."""
    with torch.no_grad():
        hidden = run_target(target, tokens)
        wanted = target.logits(hidden).float().log_softmax(-1)
    inputs = tokens[:, 1:]
    attend, positions = unrolled_attend(inputs, draft.config.sliding_window), positions_of(inputs)
    state, loss = hidden[:, :-1], torch.zeros((), device=tokens.device)
    for step in range(recipe.unroll):
        out = draft(inputs.flatten(), state.flatten(0, 1), positions, attend).view(*inputs.shape, -1)
        # The first `step` positions have no draft state before them.
        ours, theirs = out[:, step:], hidden[:, 1 + step :]
        found = draft.logits(ours).float().log_softmax(-1).flatten(0, 1)
        kl = F.kl_div(found, wanted[:, 1 + step :].flatten(0, 1), log_target=True, reduction="batchmean")
        loss = loss + recipe.step_weight**step * (kl + recipe.hidden_weight * F.smooth_l1_loss(ours, theirs))
        state = F.pad(out[:, :-1], (0, 0, 1, 0))
    return loss


def train_pair(out: Path, recipe: Recipe, device: torch.device, origin: dict[str, Any]) -> dict[str, Any]:
    """Train a target and its draft, save them in `out`, and return the record that is saved with them."""
    run = _Run(recipe, device)
    target, target_curve = run.target()
    draft, draft_curve = run.draft(target, DRAFT)
    record = {**origin, **run.record(target, draft, {"target_curve": target_curve, "draft_curve": draft_curve})}
    save_pair(out, target, draft, record)
    return record


def train_draft(out: Path, name: str, recipe: Recipe, device: torch.device, origin: dict[str, Any]) -> dict[str, Any]:
    """Train a draft of FURTHER_DRAFTS on the target in `out`, save it beside it, and return its record."""
    target = load_target(out, device=device)
    run = _Run(recipe, device)
    draft, curve = run.draft(target, FURTHER_DRAFTS[name])
    record = {**origin, **run.record(target, draft, {"draft_curve": curve})}
    for setting in ("target_steps", "target_lr", "target_decay", "byte_noise"):
        del record["recipe"][setting]
    save_draft(out, name, draft, record)
    return record


class _Run:
    """The seed, the clock and the text of one training."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.began = time.perf_counter()
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.text, self.length = corpus(), recipe.window + 1
        self.train, held_out = Windows(self.text.train, device), Windows(self.text.held_out, device)
        self.sides = {
            "train": self.train.every(12 * self.length, self.length),
            "held_out": held_out.every(self.length, self.length),
        }

    def target(self) -> tuple[LlamaTarget, _Curve]:
        """A target trained from scratch, and its curve."""
        recipe, target = self.recipe, LlamaTarget(TARGET).to(self.device)
        return target, _fit(
            target, recipe.target_steps, recipe.target_lr, recipe.target_decay,
            lambda: target_loss(target, self.train.draw(recipe.batch, self.length), recipe.byte_noise),
            lambda: target_loss(target, self.sides["held_out"]),
        )  # fmt: skip

    def draft(self, target: LlamaTarget, config: ModelConfig) -> tuple[EagleDraft, _Curve]:
        """A draft of a frozen target, and its curve."""
        recipe, draft = self.recipe, EagleDraft(config, target).to(self.device)
        batches = _mixed_batches(target, self.train, recipe)
        return draft, _fit(
            draft, recipe.draft_steps, recipe.draft_lr, recipe.draft_decay,
            lambda: draft_loss(draft, target, batches(), recipe),
            lambda: draft_loss(draft, target, self.sides["held_out"], recipe),
        )  # fmt: skip

    def record(self, target: LlamaTarget, draft: EagleDraft, curves: dict[str, _Curve]) -> dict[str, Any]:
        """How it was done and what came out."""
        recipe, losses = self.recipe, {}
        with torch.no_grad(), _autocast(self.device):
            for side, tokens in self.sides.items():
                losses[f"target_{side}"] = target_loss(target, tokens).item()
                losses[f"draft_{side}"] = draft_loss(draft, target, tokens, recipe).item()
        accepted, texts = speculate(target, draft, held_out_prompts(recipe.prompts, 96), recipe.rounds, 4)
        return {
            **_setting(self.text, self.device),
            "recipe": asdict(recipe),
            "losses": losses,
            "accepted_of_4_per_round": accepted,
            "wall_seconds": round(time.perf_counter() - self.began, 1),
            **curves,
            "samples": texts[:: max(1, len(texts) // 4)],
        }


def _mixed_batches(target: LlamaTarget, train: Windows, recipe: Recipe) -> Callable[[], torch.Tensor]:
    """Batches for the draft: half real text, half of what the target makes of its beginnings."""
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
    """Held-out loss over the steps; the model ends frozen where it was lowest, rounded as it is stored."""
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
            with torch.no_grad(), _autocast(device):
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


def _setting(text: Corpus, device: torch.device) -> dict[str, Any]:
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
