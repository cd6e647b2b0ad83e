"""What a drafter or a verifier does to a step's logits, by our ops, torch, FlashInfer's sampling (0.6.12) and Qrita
(Park et al., 2026, arXiv:2602.01518), which vLLM 0.33.0 restricts logits with.

What FlashInfer's sources say about the three things a captured step needs:

- Parameters per row: yes. top_k int32 [R] and top_p fp32 [R] on the device; top_k is off at the vocabulary size, not 0.
- Graphs: yes. No op waits for the host if seed and offset are tensors; otherwise they come from a generator on the
  host, and a graph would repeat them. But every call allocates outputs and top_p_renorm_probs' workspace, and the top-k
  ops spin on one buffer per device between their programs: two streams must not run them at the same time.
- A seed per row: no. A seed tensor of [R] is accepted, but only its first element is read; the generator's subsequence
  is then the row index (with sampling_from_logits, row * vocabulary + token). A request's draw depends on its row and
  its batch. Column same_seed_same_token shows this for each method that draws.

Deterministic: top_p_renorm_probs only if requested, as here; top_k_renorm_probs except for its normaliser, which
several programs of a row add up in any order; the others by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from spec_decode.sampling import DraftSampler, Sampling, SamplingParams
from spec_decode.sampling.kernels.restrict_logits import restrict_logits
from spec_decode.sampling.target_sampler import sample_target


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFixture:
    """logits fp32 [R, V], over the temperature; positions int64 [R] of the tokens to draw; kind: how logits spread."""

    kind: str
    logits: torch.Tensor
    positions: torch.Tensor
    params: SamplingParams
    sampling: Sampling

    @classmethod
    def make(cls, kind: str, rows: int, vocab: int, params: SamplingParams, device: torch.device) -> SamplingFixture:
        """Make rows with one restriction and a seed each; kind: of the logits, a key of KINDS."""
        generator = torch.Generator(device).manual_seed(0)
        return cls(
            kind=kind,
            logits=KINDS[kind](rows, vocab, generator),
            positions=torch.arange(rows, device=device) + 1000,
            params=params,
            sampling=Sampling.of([replace(params, seed=seed) for seed in range(rows)], device),
        )

    def alike(self, rows: int) -> SamplingFixture:
        """Repeat the first row, with its seed and position."""
        logits, positions = self.logits[:1].repeat(rows, 1), self.positions[:1].repeat(rows)
        sampling = Sampling.of([self.params] * rows, self.logits.device)
        return replace(self, logits=logits, positions=positions, sampling=sampling)


def _flat(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=generator, device=generator.device) * 3


def _peaked(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    ranks = torch.rand(rows, vocab, generator=generator, device=generator.device).argsort(-1) + 1
    return -1.5 * ranks.float().log()


KINDS: dict[str, Callable[[int, int, torch.Generator], torch.Tensor]] = {"flat": _flat, "peaked": _peaked}
"""flat: normal, of deviation 3, with 0.9 of the probability on thousands of tokens; peaked: a power law in the rank
with exponent 1.5, with 0.9 on some fifty."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """call: the work of one step, returning its output; prepare: restores what the call overwrites."""

    call: Callable[[], torch.Tensor]
    prepare: Callable[[], object] | None = None


SamplingMethod = Callable[[SamplingFixture], TimedCall]


def our_logits(fixture: SamplingFixture) -> TimedCall:
    """Restrict logits fp32 [R, V] in place, to -inf outside."""
    work, sampling = fixture.logits.clone(), fixture.sampling

    def call() -> torch.Tensor:
        restrict_logits(work, top_k=sampling.top_k, top_p=sampling.top_p, min_log_p=sampling.min_log_p)
        return work

    return TimedCall(call, lambda: work.copy_(fixture.logits))


def qrita_logits(fixture: SamplingFixture) -> TimedCall:
    """Restrict logits fp32 [R, V], to -inf outside, as vLLM calls Qrita: without a restriction that no row has."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    work, params = fixture.logits.clone(), fixture.params
    top_k = fixture.sampling.top_k if params.top_k else None
    top_p = fixture.sampling.top_p if params.top_p < 1 else None
    # It may return its input or a copy.
    return TimedCall(lambda: apply_top_k_top_p_triton(work, top_k, top_p), lambda: work.copy_(fixture.logits))


def _softmax_of(logits: SamplingMethod) -> SamplingMethod:
    """Follow a method that restricts logits by torch's softmax."""

    def method(fixture: SamplingFixture) -> TimedCall:
        restricted = logits(fixture)
        return TimedCall(lambda: restricted.call().softmax(-1), restricted.prepare)

    return method


our_probs = _softmax_of(our_logits)
"""Probabilities fp32 [R, V], as a verifier computes them."""
qrita_probs = _softmax_of(qrita_logits)
"""The same by Qrita."""


def our_draft(fixture: SamplingFixture) -> TimedCall:
    """Draw a drafter's tokens int64 [R]; also stores them, and the logits for the verifier."""
    (rows, vocab), device = fixture.logits.shape, fixture.logits.device
    sampler = DraftSampler(
        torch.ones(rows, dtype=torch.int32, device=device),
        fixture.positions,
        torch.zeros(1, dtype=torch.int64, device=device),
        num_speculative_tokens=2,
        vocab_size=vocab,
    )
    sampler.temperature.copy_(fixture.sampling.temperature)
    sampler.seeds.copy_(fixture.sampling.seeds)

    def call() -> torch.Tensor:
        sampler(fixture.logits)
        return sampler.next_ids

    return TimedCall(call)


def our_target(fixture: SamplingFixture) -> TimedCall:
    """Draw a verifier's own tokens int64 [R], with temperature, restriction and draw."""
    return TimedCall(lambda: sample_target(fixture.logits, sampling=fixture.sampling, positions=fixture.positions))


def torch_argmax(fixture: SamplingFixture) -> TimedCall:
    """Take greedy tokens int64 [R]."""
    return TimedCall(lambda: fixture.logits.argmax(-1))


def _flashinfer(call: Callable[[Any, SamplingFixture], torch.Tensor]) -> SamplingMethod:
    """Wrap a call that gets the module flashinfer.sampling, imported when the method is used."""

    def method(fixture: SamplingFixture) -> TimedCall:
        from flashinfer import sampling  # type: ignore[import-not-found]

        return TimedCall(lambda: call(sampling, fixture))

    return method


def _top_p_renorm(module: Any, probs: torch.Tensor, fixture: SamplingFixture) -> torch.Tensor:
    out: torch.Tensor = module.top_p_renorm_probs(probs, fixture.sampling.top_p, is_deterministic=True)
    return out


top_k_mask = _flashinfer(lambda module, f: module.top_k_mask_logits(f.logits, f.sampling.top_k))
"""As our_logits with top_k, but out of place."""
top_p_renorm = _flashinfer(lambda module, f: _top_p_renorm(module, module.softmax(f.logits), f))
"""As our_probs with top_p: softmax, then renormalised."""
both_renorm = _flashinfer(
    lambda module, f: _top_p_renorm(module, module.top_k_renorm_probs(module.softmax(f.logits), f.sampling.top_k), f)
)
"""As our_probs with both: softmax, then renormalised twice."""
mask_renorm = _flashinfer(
    lambda module, f: _top_p_renorm(module, module.softmax(module.top_k_mask_logits(f.logits, f.sampling.top_k)), f)
)
"""The same: top_k on the logits, softmax, and renormalised once."""
from_logits = _flashinfer(
    lambda module, f: module.sampling_from_logits(f.logits, seed=f.sampling.seeds, offset=f.positions)
)
"""Tokens int32 [R] by the Gumbel-max trick."""
from_probs = _flashinfer(
    lambda module, f: module.sampling_from_probs(module.softmax(f.logits), seed=f.sampling.seeds, offset=f.positions)
)
"""Tokens int32 [R] by inverting the distribution of a softmax."""
from_restricted = _flashinfer(
    lambda module, f: module.top_k_top_p_sampling_from_probs(
        module.softmax(f.logits), f.sampling.top_k, f.sampling.top_p, seed=f.sampling.seeds, offset=f.positions
    )
)
"""Tokens int32 [R] inside top_k, then top_p, of a softmax, by rejection sampling."""
