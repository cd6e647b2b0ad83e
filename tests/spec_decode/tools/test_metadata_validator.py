"""The validator finds what goes wrong in a running drafter, and only that; it leaves no trace."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch

from attn_backends import AttentionBackend, get
from attn_backends.torch_reference import TorchReference
from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionSpec,
    BatchError,
    GraphSupport,
    ReferenceBuilder,
    ReferenceMetadata,
)
from spec_decode.conformance import soak_rounds
from spec_decode.conformance.soak_rounds import SoakDrafter
from spec_decode.conformance.soak_schedule import ScheduledRound
from spec_decode.drafter import Strategy
from spec_decode.testing.outcome import Unsupported
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject
from spec_decode.tools.metadata_validator import MetadataDrift, MetadataValidator
from spec_decode.tools.validated_rounds import validate_rounds
from tests.foreseen import Foreseen
from tests.mutants import MUTANTS, mutant_named
from tests.mutants.mutant import freeze, with_builder

CPU = torch.device("cpu")
ROUNDS = 6
FEW = 4
"""Rounds that drafts are compared in: all that show a mutant show it by then."""
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
NOT_SHOWN = [name for name, mutant in BY_NAME.items() if mutant.not_shown]


class Rebuilt(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, "for the test")


class Uncapturable(ReferenceBuilder):
    graph_support = GraphSupport.NEVER


def candidate_of(
    backend: AttentionBackend, strategy: Strategy | None = None, count: int = FEW
) -> tuple[SoakDrafter, list[tuple[ScheduledRound, Any]]]:
    """A drafter, and rounds with what each starts from."""
    fixture = soak_rounds.soak_fixture(Subject(backend, CPU))
    rounds = soak_rounds.soak_rounds(fixture, (1, 2), seed=0)
    return SoakDrafter.make(fixture, strategy), list(islice(rounds, count))


def tensors_reached(root: object) -> dict[int, torch.Tensor]:
    """Every tensor that an object of this project leads to."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found[id(item)] = item
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif type(item).__module__.startswith(("builders", "spec_decode", "attn_backends")):
            names = [slot for kind in type(item).__mro__ for slot in getattr(kind, "__slots__", ())]
            waiting += [getattr(item, name) for name in names if hasattr(item, name)]
            waiting += vars(item).values() if hasattr(item, "__dict__") else []
    return found


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer batch sizes to capture, and a loop of two steps behind the first."""
    monkeypatch.setattr(soak_rounds, "MAX_REQS", 2)
    monkeypatch.setattr(soak_rounds, "DRAFT_TOKENS", 3)


@pytest.fixture(autouse=True)
def no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """One mutant keeps its first builder's buffer for all others: another test's would be of another size."""
    monkeypatch.setattr(mutant_named("builders_share_buffers").backend.builder, "_pool", None)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in NOT_SHOWN])
def test_validator_catches_mutant_or_drafter_refuses_it(name: str) -> None:
    mutant = mutant_named(name)
    with pytest.raises(mutant.refused or MetadataDrift):
        validate_rounds(mutant.backend, CPU, rounds=5 * ROUNDS)


def test_mutant_right_on_one_page_size_fails_another() -> None:
    lister = mutant_named("pages_have_16_tokens").backend
    assert validate_rounds(lister, CPU, rounds=ROUNDS).validations == ROUNDS
    with pytest.raises(MetadataDrift, match="page_counts"):
        validate_rounds(lister, CPU, rounds=ROUNDS, page_size=8)


def test_unsupported_page_size_is_not_validated() -> None:
    with pytest.raises(Unsupported, match="page"):
        validate_rounds(get("triton_paged"), CPU, rounds=1, page_size=12)


def tokens_of(backend: AttentionBackend) -> list[torch.Tensor]:
    candidate, rounds = candidate_of(backend)
    return [candidate.draft(*round_).tokens.clone() for round_ in rounds]


@cache
def reference_tokens() -> list[torch.Tensor]:
    return tokens_of(get("torch_reference"))


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_mutant_not_shown_drafts_like_reference(name: str) -> None:
    drafted = zip(tokens_of(mutant_named(name).backend), reference_tokens(), strict=True)
    assert all(torch.equal(tokens, wanted) for tokens, wanted in drafted)


RIGHT = [("torch_reference", strategy, strategy) for strategy in Strategy if strategy is not Strategy.PIECEWISE]
RIGHT += [(name, None, Strategy.FULL_LOOP) for name in ("triton_paged", "triton_mla", "sparse_swa_mla")]
# Groups that do not advance in place.
RIGHT += [(Foreseen(), None, Strategy.FULL_LOOP), (with_builder(Rebuilt), None, Strategy.PER_STEP)]
RIGHT += [(with_builder(Uncapturable), None, Strategy.PIECEWISE)]


@pytest.mark.parametrize(("backend", "requested", "strategy"), RIGHT)
def test_a_right_backend_never_drifts(
    backend: AttentionBackend | str, requested: Strategy | None, strategy: Strategy
) -> None:
    instance = get(backend) if isinstance(backend, str) else backend
    validated = validate_rounds(instance, CPU, rounds=ROUNDS, strategy=requested)
    assert (validated.strategy, validated.validations) == (strategy.value, ROUNDS) and validated.leaves > 0


def test_wrong_kernel_of_rebuild_group_is_caught() -> None:
    wrong = type("Wrong", (type(mutant_named("gqa_interleaved").backend),), {"builder": Rebuilt})()
    with pytest.raises(MetadataDrift, match="attention over the current caches"):
        validate_rounds(wrong, CPU, rounds=ROUNDS)


class AttendsWithoutARequest(TorchReference):
    def forward(self, query: torch.Tensor, cache: Any, metadata: ReferenceMetadata, **options: Any) -> torch.Tensor:
        out = super().forward(query, cache, metadata, **options)
        return out.masked_fill((metadata.kv_end <= metadata.kv_start)[:, None, None], 1.0)


def test_row_without_request_attending_is_caught() -> None:
    with pytest.raises(MetadataDrift, match="rows without a request attend to nothing"):
        validate_rounds(AttendsWithoutARequest(), CPU, rounds=ROUNDS)


@pytest.mark.parametrize(
    ("backend", "field"),
    [("torch_reference", "kv_end"), ("triton_paged", "seq_lens"), ("sparse_swa_mla", "slot_mapping")],
)
def test_stale_field_is_named_with_place_and_values(backend: str, field: str) -> None:
    with pytest.raises(MetadataDrift, match=rf"field {field} .*expected: {field}\[.*got: ") as drift:
        validate_rounds(freeze(backend, field), CPU, rounds=ROUNDS)
    assert (drift.value.round, drift.value.step, drift.value.group) == (1, 0, "draft")


@pytest.fixture
def running() -> tuple[Any, MetadataValidator, list[Any]]:
    """A drafter of the reference, its validator, and rounds; one is drafted and validated."""
    candidate, rounds = candidate_of(get("torch_reference"))
    validator = MetadataValidator(candidate.drafter)
    candidate.draft(*rounds[0], validator.propose)
    return candidate, validator, rounds


def test_drift_in_later_step_is_named_by_step(running: Any) -> None:
    candidate, validator, _ = running
    _, last = candidate.drafter.metadata_in_use().values()
    last.metadata[0].kv_end.add_(1)
    with pytest.raises(MetadataDrift, match="field kv_end") as drift:
        validator.validate()
    assert drift.value.step == 2


def test_metadata_moved_after_validation_is_named(running: Any) -> None:
    candidate, validator, _ = running
    metadata = candidate.drafter.metadata_in_use()[0].metadata[0]
    object.__setattr__(metadata, "kv_end", metadata.kv_end.clone())
    with pytest.raises(MetadataDrift, match="stays at its addresses: field kv_end"):
        validator.validate()


def test_a_validation_changes_nothing(running: Any) -> None:
    candidate, validator, rounds = running
    for round_ in rounds[1:3]:
        candidate.draft(*round_)
        before = {key: tensor.clone() for key, tensor in tensors_reached(candidate.drafter).items()}
        state = torch.random.get_rng_state()
        validator.validate()
        after = tensors_reached(candidate.drafter)
        assert before.keys() == after.keys() and len(before) > 40
        # As bits: what graphs hold between replays may be NaN.
        assert all(torch.equal(bits(after[key]), bits(tensor)) for key, tensor in before.items())
        assert torch.equal(torch.random.get_rng_state(), state)


def test_validated_rounds_draft_the_same_tokens() -> None:
    seen, rounds = candidate_of(get("torch_reference"))
    validator = MetadataValidator(seen.drafter)
    for round_, expected in zip(rounds, reference_tokens(), strict=True):
        assert torch.equal(seen.draft(*round_, validator.propose).tokens, expected)


def test_every_nth_round_is_validated_and_timed() -> None:
    candidate, rounds = candidate_of(get("torch_reference"), count=ROUNDS)
    validator = MetadataValidator(candidate.drafter, every=3)
    for round_ in rounds:
        candidate.draft(*round_, validator.propose)
    assert (validator.rounds, validator.validations) == (ROUNDS, ROUNDS // 3)
    assert validator.milliseconds > 0


def test_one_token_round_validates_only_step_0() -> None:
    candidate, rounds = candidate_of(get("torch_reference"), Strategy.DEVICE_LOOP)
    validator = MetadataValidator(candidate.drafter)
    candidate.draft(*rounds[0], lambda verified: validator.propose(verified, 1))
    assert [*candidate.drafter.metadata_in_use()] == [0] and validator.validations == 1


def test_a_validator_of_no_round_is_refused(running: Any) -> None:
    with pytest.raises(BatchError, match="every must be 1 or more, got 0"):
        MetadataValidator(running[0].drafter, every=0)
