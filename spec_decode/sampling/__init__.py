"""Sampling: parameters, noise, and the samplers of draft and target."""

from spec_decode.sampling.candidate_sampler import CandidateSampler
from spec_decode.sampling.draft_sampler import DraftSampler
from spec_decode.sampling.parameters import Sampling, SamplingParams
from spec_decode.sampling.target_sampler import sample_target

__all__ = ["CandidateSampler", "DraftSampler", "Sampling", "SamplingParams", "sample_target"]
