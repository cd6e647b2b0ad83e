"""Sampling: parameters, noise, and the sampler of drafts; others are loaded where they are used."""

from spec_decode.sampling.draft_sampler import DraftSampler
from spec_decode.sampling.parameters import Sampling, SamplingParams

__all__ = ["DraftSampler", "Sampling", "SamplingParams"]
