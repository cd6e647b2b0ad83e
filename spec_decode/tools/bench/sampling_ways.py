"""What a drafter or a verifier does to a step's logits, by our ops, by torch and by FlashInfer's sampling (0.6.12).

What its sources say of the three things that a captured step needs:

- Parameters a row: yes. top_k int32 [R] and top_p fp32 [R] on the device; off is a top_k of the vocabulary, not 0.
- Graphs: yes. No op waits for the host, as long as seed and offset are tensors: else they come from a generator on the
  host, and a graph would repeat them. But outputs, and top_p_renorm_probs' workspace, are allocated in every call, and
  the top-k ops spin on one buffer a device between their programs: two streams must not run them at the same time.
- A seed a row: no. A seed tensor of [R] is taken and only its first element read; the generator's subsequence is then
  the row's number (with sampling_from_logits, row * vocabulary + token). A request's draw depends on where in which
  batch it stands. Column same_seed_same_token shows this for each way of drawing.

The same in every run: top_p_renorm_probs only if asked to, as here, and top_k_renorm_probs but for its normaliser,
which several programs of a row add up in any order; the others are by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from spec_decode.sampling import DraftSampler, Sampling, SamplingParams, sample_target
from spec_decode.sampling.kernels.restrict_logits import restrict_logits


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingScene:
    """logits fp32 [R, V], over the temperature; positions int64 [R] of the tokens to draw; kind: how logits spread."""

    kind: str
    logits: torch.Tensor
    positions: torch.Tensor
    params: SamplingParams
    sampling: Sampling

    @classmethod
    def make(cls, kind: str, rows: int, vocab: int, params: SamplingParams, device: torch.device) -> SamplingScene:
        """Rows of one restriction and a seed each, of logits of one of KINDS."""
        generator = torch.Generator(device).manual_seed(0)
        return cls(
            kind=kind,
            logits=KINDS[kind](rows, vocab, generator),
            positions=torch.arange(rows, device=device) + 1000,
            params=params,
            sampling=Sampling.of([replace(params, seed=seed) for seed in range(rows)], device),
        )

    def alike(self, rows: int) -> SamplingScene:
        """The first row several times, its seed and position too."""
        return SamplingScene(
            kind=self.kind,
            logits=self.logits[:1].repeat(rows, 1),
            positions=self.positions[:1].repeat(rows),
            params=self.params,
            sampling=Sampling.of([self.params] * rows, self.logits.device),
        )


def _flat(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=generator, device=generator.device) * 3


def _peaked(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    ranks = torch.rand(rows, vocab, generator=generator, device=generator.device).argsort(-1) + 1
    return -1.5 * ranks.float().log()


KINDS: dict[str, Callable[[int, int, torch.Generator], torch.Tensor]] = {"flat": _flat, "peaked": _peaked}
"""flat: normal, of deviation 3, where 0.9 of the probability is with thousands of tokens; peaked: falling with the
rank's power of 1.5, where it is with some fifty."""


@dataclass(frozen=True, slots=True)
class Contender:
    """call: the work of one step, and its output; prepare: restores what the call overwrites."""

    call: Callable[[], torch.Tensor]
    prepare: Callable[[], object] | None = None


Way = Callable[[SamplingScene], Contender]


def our_logits(scene: SamplingScene) -> Contender:
    """Logits fp32 [R, V], -inf outside the restriction, in place."""
    work, sampling = scene.logits.clone(), scene.sampling

    def call() -> torch.Tensor:
        restrict_logits(work, top_k=sampling.top_k, top_p=sampling.top_p)
        return work

    return Contender(call, lambda: work.copy_(scene.logits))


def our_probs(scene: SamplingScene) -> Contender:
    """Probabilities fp32 [R, V], as a verifier makes them."""
    restricted = our_logits(scene)
    return Contender(lambda: restricted.call().softmax(-1), restricted.prepare)


def our_draft(scene: SamplingScene) -> Contender:
    """A drafter's tokens int64 [R]. It also stores them, and the logits for the verifier."""
    (rows, vocab), device = scene.logits.shape, scene.logits.device
    sampler = DraftSampler(
        torch.ones(rows, dtype=torch.int32, device=device),
        scene.positions,
        torch.zeros(1, dtype=torch.int64, device=device),
        num_speculative_tokens=2,
        vocab_size=vocab,
    )
    sampler.temperature.copy_(scene.sampling.temperature)
    sampler.seeds.copy_(scene.sampling.seeds)

    def call() -> torch.Tensor:
        sampler(scene.logits)
        return sampler.next_ids

    return Contender(call)


def our_target(scene: SamplingScene) -> Contender:
    """A verifier's own tokens int64 [R], with temperature, restriction and draw."""
    return Contender(lambda: sample_target(scene.logits, sampling=scene.sampling, positions=scene.positions))


def torch_argmax(scene: SamplingScene) -> Contender:
    """Greedy tokens int64 [R]."""
    return Contender(lambda: scene.logits.argmax(-1))


def top_k_mask(scene: SamplingScene) -> Contender:
    """What our_logits gives of top_k, in a tensor of its own."""
    from flashinfer import sampling  # type: ignore[import-not-found]

    return Contender(lambda: sampling.top_k_mask_logits(scene.logits, scene.sampling.top_k))


def top_p_renorm(scene: SamplingScene) -> Contender:
    """What our_probs gives of top_p: softmax, then renormalised."""
    from flashinfer import sampling

    top_p = scene.sampling.top_p
    return Contender(
        lambda: sampling.top_p_renorm_probs(sampling.softmax(scene.logits), top_p, is_deterministic=True),
    )


def both_renorm(scene: SamplingScene) -> Contender:
    """What our_probs gives of both: softmax, then renormalised twice."""
    from flashinfer import sampling

    def call() -> torch.Tensor:
        probs = sampling.top_k_renorm_probs(sampling.softmax(scene.logits), scene.sampling.top_k)
        out: torch.Tensor = sampling.top_p_renorm_probs(probs, scene.sampling.top_p, is_deterministic=True)
        return out

    return Contender(call)


def mask_renorm(scene: SamplingScene) -> Contender:
    """The same: top_k on the logits, softmax, and renormalised once."""
    from flashinfer import sampling

    def call() -> torch.Tensor:
        probs = sampling.softmax(sampling.top_k_mask_logits(scene.logits, scene.sampling.top_k))
        out: torch.Tensor = sampling.top_p_renorm_probs(probs, scene.sampling.top_p, is_deterministic=True)
        return out

    return Contender(call)


def from_logits(scene: SamplingScene) -> Contender:
    """Tokens int32 [R] by Gumbel's maximum."""
    from flashinfer import sampling

    seed, offset = scene.sampling.seeds, scene.positions
    return Contender(lambda: sampling.sampling_from_logits(scene.logits, seed=seed, offset=offset))


def from_probs(scene: SamplingScene) -> Contender:
    """Tokens int32 [R] by inverting the distribution of a softmax."""
    from flashinfer import sampling

    seed, offset = scene.sampling.seeds, scene.positions
    return Contender(
        lambda: sampling.sampling_from_probs(sampling.softmax(scene.logits), seed=seed, offset=offset),
    )


def from_restricted(scene: SamplingScene) -> Contender:
    """Tokens int32 [R] inside top_k, then top_p, of a softmax, by drawing until one is."""
    from flashinfer import sampling

    rows, seed, offset = scene.sampling, scene.sampling.seeds, scene.positions

    def call() -> torch.Tensor:
        probs = sampling.softmax(scene.logits)
        tokens: torch.Tensor = sampling.top_k_top_p_sampling_from_probs(
            probs, rows.top_k, rows.top_p, seed=seed, offset=offset
        )
        return tokens

    return Contender(call)
