"""Whole rounds of the draft fixture in a strategy, and the first bit in which two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial

import torch

from builders.kernels.triton_runtime import torch_implementations
from spec_decode.drafter import Strategy, StrategyError, VerifiedTokens
from spec_decode.sampling.draft_sampler import NO_TOKEN
from spec_decode.testing.draft_fixture import DraftFixture
from spec_decode.testing.outcome import expect
from spec_decode.trees import Tree

without_interpreter = torch_implementations()
"""Whole rounds under the interpreter would take an hour; other checks cover each kernel."""
_ROUNDS = 2
_FIRST_PAUSED = 1
"""The first of two paused rounds in a row, after one that drafted and before two that draft again."""


def verified_tokens(fixture: DraftFixture, contexts: list[int], temperature: float, round_: int) -> VerifiedTokens:
    """Return the inputs of a round, deterministic per round index."""
    generator = torch.Generator().manual_seed(100 + round_)
    n, width, model = len(contexts), fixture.num_speculative_tokens + 1, fixture.model
    tensors = {
        "token_ids": torch.randint(0, model.vocab_size, (n, width), generator=generator),
        "target_hidden_states": torch.randn(n, width, model.hidden_size, generator=generator).to(fixture.spec.dtype),
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "accepted": torch.randint(0, width, (n,), generator=generator, dtype=torch.int32),
        "next_tokens": torch.randint(0, model.vocab_size, (n,), generator=generator),
        "temperature": torch.full((n,), temperature),
        "seeds": torch.arange(n) * 7919 + 3,
    }
    return VerifiedTokens(**{name: tensor.to(fixture.subject.device) for name, tensor in tensors.items()})


DraftRun = dict[tuple[int, str], torch.Tensor]
"""The outcome of two rounds by round and field: tokens and logits of each; cache and overflow flags after the last."""
_AXES = {
    "draft tokens": ("step", "row"),
    "parents": ("token of the tree", "row"),
    "cached logits": ("step", "row", "column"),
    "key cache": ("layer", "page", "slot", "head", "dim"),
    "value cache": ("layer", "page", "slot", "head", "dim"),
    "overflow flags": ("row",),
}


def draft(
    fixture: DraftFixture,
    strategy: Strategy,
    *,
    temperature: float,
    draft_lens: Sequence[int] | None = None,
    min_confidence: float = 0.0,
    tree: Tree | None = None,
) -> DraftRun:
    """Run two rounds; for the second, the first request leaves and the others change rows. draft_lens: per request."""
    drafter = fixture.kept_drafter(
        strategy, capture_sizes=(fixture.num_reqs,), min_confidence=min_confidence, tree=tree
    )
    tables = drafter.tables
    lengths = None if draft_lens is None else torch.tensor(draft_lens, dtype=torch.int32, device=tables.device)
    contexts, limits, pages = fixture.contexts(), fixture.limits(), fixture.pages
    run: DraftRun = {}
    for round_ in range(_ROUNDS):
        tables.load(pages, limits)
        verified = verified_tokens(fixture, contexts, temperature, round_)
        if lengths is not None:
            verified = verified._replace(draft_lens=lengths[-len(contexts) :])
        drafts = drafter.propose(verified)
        run[round_, "draft tokens"] = drafts.tokens.T.clone()
        if drafts.parents is None:
            logits = torch.where(drafts.tokens[..., None] >= 0, drafts.logits, 0.0)
            run[round_, "cached logits"] = logits.transpose(0, 1)
        else:
            run[round_, "parents"] = drafts.parents.T.clone()
        moved = [c + int(a) + 1 for c, a in zip(contexts, verified.accepted.cpu(), strict=True)]
        stay = slice(1, None) if len(moved) > 1 else slice(None)
        contexts, limits, pages = moved[stay], limits[stay], [rows[stay] for rows in pages]
    caches = [cache for group in drafter.groups for cache in group.caches.values()]
    after = {f"{part} cache": torch.stack([getattr(cache, part) for cache in caches]) for part in ("key", "value")}
    after["overflow flags"] = tables.overflow.clone()
    return run | {(_ROUNDS, field): tensor for field, tensor in after.items()}


class Pause(Enum):
    """Who drafts nothing for some rounds, and how that is requested."""

    ONE_REQUEST = "the last request by its length"
    ALL_BY_LENGTHS = "all requests by their lengths"
    ALL_BY_NUM_TOKENS = "all requests by num_tokens"


def draft_after_a_pause(
    fixture: DraftFixture, strategy: Strategy, pause: Pause | None, *, temperature: float
) -> DraftRun:
    """Run five rounds with the second and third paused; from the second on a round adds one token, as in plain
    decoding. Proposals of the last request, or of all of them, in paused rounds are left out."""
    drafter, steps = fixture.kept_drafter(strategy, capture_sizes=(fixture.num_reqs,)), fixture.num_speculative_tokens
    tables = drafter.tables
    tables.load(fixture.pages, fixture.limits())
    contexts = torch.tensor(fixture.contexts(), dtype=torch.int32, device=tables.device)
    whole = torch.full_like(contexts, steps)
    paused = whole.clone()
    paused[-1 if pause is Pause.ONE_REQUEST else slice(None)] = 0
    run: DraftRun = {}
    for round_ in range(5):
        verified = verified_tokens(fixture, fixture.contexts(), temperature, round_)._replace(context_lens=contexts)
        if round_ >= _FIRST_PAUSED:
            verified = verified._replace(accepted=torch.zeros_like(verified.accepted))
        middle = round_ in (_FIRST_PAUSED, _FIRST_PAUSED + 1)
        by_length = middle and pause in (Pause.ONE_REQUEST, Pause.ALL_BY_LENGTHS)
        verified = verified._replace(draft_lens=paused if by_length else whole)
        none = middle and pause is Pause.ALL_BY_NUM_TOKENS
        drafts = drafter.propose(verified, 0 if none else None)
        kept = slice(None, -1) if middle else slice(None)
        if not middle or pause in (None, Pause.ONE_REQUEST):
            run[round_, "draft tokens"] = drafts.tokens[kept].T.clone()
            run[round_, "cached logits"] = drafts.logits[kept].transpose(0, 1).clone()
        elif drafts.tokens.numel():
            expect_none(drafts.tokens, round_)
        contexts = contexts + verified.accepted + 1
    return run


def expect_none(tokens: torch.Tensor, round_: int) -> None:
    """Raise CheckFailure if a request that must not draft has draft tokens."""
    contract, got = f"a request that drafts nothing proposes {NO_TOKEN}, in round {round_}", tokens.tolist()
    expect(bool((tokens == NO_TOKEN).all()), contract=contract, expected=f"{NO_TOKEN} everywhere", got=got)


def compare(draft: partial[DraftRun]) -> tuple[DraftRun, int]:
    """Compare eager's run with every other strategy the backend can run; return it and the number of others.

    Raises CheckFailure if one differs, or if there is no other strategy.
    """
    eager, compared = draft(Strategy.EAGER), 0
    for strategy in Strategy:
        if strategy is Strategy.EAGER:
            continue
        try:
            run = draft(strategy)
        except StrategyError:
            continue
        expect_same(run, eager, f"{strategy.value} at temperature {draft.keywords['temperature']:g}")
        compared += 1
    expect(compared > 0, contract="a graph strategy runs on the backend", expected="at least one", got="none")
    return eager, compared


def expect_same(run: DraftRun, wanted: DraftRun, what: str) -> None:
    """Raise CheckFailure for the earliest step, row and field in which the run differs from `wanted`."""
    differing = {key: (run[key] != tensor).nonzero().tolist() for key, tensor in wanted.items()}
    found = [(key[0], where[0], key) for key, where in differing.items() if where]
    if found:
        round_, where, key = min(found)
        field, at = key[1], ", ".join(f"{axis} {i}" for axis, i in zip(_AXES[key[1]], where, strict=True))
        when = "after the last round" if field.endswith(("cache", "flags")) else f"in round {round_}"
        expect(
            False,
            contract=f"{what}: every field has the same bits; the first that differs is {field}, {at}, {when}",
            expected=f"{wanted[key][tuple(where)].item()}",
            got=f"{run[key][tuple(where)].item()} ({len(differing[key])} of {wanted[key].numel()} differ)",
        )
