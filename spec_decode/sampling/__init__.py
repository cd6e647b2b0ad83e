"""Sampling: parameters, noise, and the samplers of the draft; the target's is in `target_sampler`."""

from spec_decode.sampling.draft_sampler import DraftSampler
from spec_decode.sampling.parameters import Sampling, SamplingParams

__all__ = ["DraftSampler", "Sampling", "SamplingParams"]
