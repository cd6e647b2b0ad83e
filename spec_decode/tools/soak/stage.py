"""What a soak is played on: a small random draft on one backend, and the requests' bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders import AttentionSpec
from spec_decode.drafter import Strategy
from spec_decode.models import EagleDraft
from spec_decode.testing.draft_fixture import draft_model, draft_spec
from spec_decode.testing.subject import Subject
from spec_decode.tools.soak.inputs import Inputs
from spec_decode.tools.soak.schedule import Setting
from spec_decode.tools.soak.sides import Side

MAX_SEQ_LEN = {"cuda": 1024, "cpu": 128}
"""Tokens of the longest request: several splits for every kernel; on the CPU, what an emulator does quickly."""
_WINDOWS = 4
"""Sliding windows in the longest request."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One draft model for every side over it."""

    subject: Subject
    spec: AttentionSpec
    model: EagleDraft
    setting: Setting

    @classmethod
    def of(cls, subject: Subject, *, max_reqs: int, steps: int, page_size: int | None = None) -> Stage:
        """steps: draft tokens a round. Raises Unsupported where the backend refuses every spec of the kit, or the page
        size, if one is asked for.
        """
        longest = MAX_SEQ_LEN[subject.device.type]
        spec = draft_spec(subject, window=longest // _WINDOWS, page_size=page_size)
        setting = Setting(
            max_reqs=max_reqs,
            steps=steps,
            max_seq_len=longest,
            page_size=spec.page_size,
            window=spec.sliding_window,
        )
        return cls(subject, spec, draft_model(spec, subject.device, max_seq_len=longest), setting)

    def side(self, strategy: Strategy | None) -> Side:
        """strategy: None takes the one with the least host work that the backend allows."""
        return Side.make(self.subject, self.spec, self.model, self.setting, strategy)

    def inputs(self, seed: int) -> Inputs:
        """Buffers for the rounds' inputs."""
        device: torch.device = self.subject.device
        setting = self.setting
        return Inputs(
            self.model.config, self.spec.dtype, device, max_reqs=setting.max_reqs, steps=setting.steps, seed=seed
        )
