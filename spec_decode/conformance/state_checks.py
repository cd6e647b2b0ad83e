"""Family state: what slots hold is a sequential run of each request's verified tokens, whatever ran in between."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_backends import Rejected, StateFeature, StateInputs
from builders import AdvanceLevel, BatchError, Recurrence, StateSpec
from spec_decode.conformance.check import Cases, Family
from spec_decode.conformance.coverage import ADVANCE, MEMORY, REFUSALS, column, of_state, only
from spec_decode.conformance.drawn_cases import drawn_seed
from spec_decode.conformance.drawn_states import STEPS, DrawnState, drawn_states
from spec_decode.testing.outcome import CheckFailure, Measurements, Unsupported, expect
from spec_decode.testing.state_fixture import StateFixture
from spec_decode.testing.state_oracle import Text
from spec_decode.testing.state_subject import JOURNALS, QUERY, RESERVE, StateSubject, varied

check = Family("state", covers=of_state("mode:verify"), of=StateSubject)

_VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "long_journal": {"journal": JOURNALS[-2]},
    "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16},
    **{each.value: {"recurrence": each} for each in Recurrence},
    "one_value_head_per_key": {"num_value_heads": 2},
    "dims_128": {"key_dim": 128, "value_dim": 128, "num_key_heads": 1, "num_value_heads": 1},
    "conv_width_2": {"conv_width": 2},
}
_DRAFTS = QUERY - 1
_TREE = (-1, 0, 0, 1, 2, 4, 3)
_PATHS = ((2, 4, 5), (1, 3, 6), (1,), (2,))
"""Query tokens of accepted paths, behind the root."""


def _specs(*variants: str, **changes: Any) -> Cases:
    """Return a case generator: these variants, each with the changes too."""

    def generate(subject: StateSubject) -> Iterator[tuple[str, StateSpec]]:
        base = subject.base_spec()
        for name in variants:
            spec = varied(base, **_VARIANTS[name], **changes)
            if name == "base" or spec != base:
                yield name, spec

    return generate


_SHORT_AND_LONG = _specs("base", "long_journal")


def _admitted(subject: StateSubject, spec: StateSpec) -> StateFixture:
    """Return three requests with prompts, in slots that are in no order."""
    fixture = StateFixture(subject, spec)
    fixture.admit(4, 9)
    fixture.admit(0, 1)
    fixture.admit(2, 2, 5)
    return fixture


@check(
    "outputs, states and windows are those of a sequential run of the verified tokens, within twice the error of a "
    "low-precision one",
    _specs(*_VARIANTS),
)
def steps_mean_a_sequential_run(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture, draw = _admitted(subject, spec), random.Random(0)
    for _ in range(8):
        accepted = {slot: draw.randint(0, _DRAFTS) for slot in fixture.texts}
        fixture.verify(accepted, "a verification")
        fixture.expect_states("after a verification")
    return fixture.measured


@check(
    "a sequential run, at any sizes that a backend claims: dims, heads, widths, journals, requests, tokens, no bias",
    lambda subject: drawn_states(subject, drawn_seed()),
    covers=lambda subject, case: of_state()(subject, case.spec),
)
def sizes_are_served(subject: StateSubject, case: DrawnState) -> Measurements:
    fixture = StateFixture(subject, case.spec, rows=case.rows, slots=case.rows + 1, layers=1, bias=case.bias)
    draw, slots = random.Random(0), range(case.rows, 0, -1)
    fixture.begin({slot: case.prompt if slot == 1 else draw.randint(1, case.prompt) for slot in slots})
    fixture.expect_states("after prompts")
    for _ in range(STEPS):
        accepted = {slot: draw.randrange(case.query) for slot in slots}
        fixture.verify(accepted, "a verification", count=case.query, captured=False)
        fixture.expect_states("after a verification")
    return fixture.measured


@check("500 steps of one token mean a sequential run", _specs("base"), covers=of_state("mode:decode"))
def steps_go_on(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture = StateFixture(subject, spec, rows=1)
    fixture.admit(3, 3)
    for step in range(500):
        fixture.verify({3: 0}, f"step {step + 1}", count=1)
    fixture.expect_states("after 500 steps")
    return fixture.measured


@check("however many drafts of a step are accepted, the rejected ones leave nothing", _SHORT_AND_LONG)
def rejected_tokens_leave_nothing(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture = _admitted(subject, spec)
    for accepted in (*range(QUERY), *reversed(range(QUERY))):
        fixture.verify(dict.fromkeys(fixture.texts, accepted), f"the step after one of {accepted} accepted drafts")
        fixture.expect_states(f"after {accepted} accepted drafts")
    return fixture.measured


@check(
    "the convolution's window ends at the last verified token", _specs("base", "long_journal", "conv_width_2", "conv")
)
def windows_roll_back(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture = _admitted(subject, spec)
    for accepted in (0, 1, 0):
        tokens = {slot: fixture.tokens(QUERY) for slot in fixture.texts}
        for drafts in (tokens[slot] for slot in tokens):
            # An update of 0, so that only the window can hold what a draft leaves.
            drafts.beta[:, 1:] = 0
        after = fixture.run(tokens, "a step")
        fixture.texts = {slot: after[slot][accepted] for slot in after}
        fixture.expect_states(f"after {accepted} accepted drafts")
    return fixture.measured


@check("a request's state goes with it when rows join, leave and change places", _SHORT_AND_LONG)
def rows_can_move(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture = _admitted(subject, spec)
    for slots in ((2, 4, 0), (0,), (4, 2), (0, 2, 4), (2,), (4, 0)):
        fixture.verify(dict.fromkeys(slots, 1), f"rows of the slots {list(slots)}")
    fixture.expect_states("after rows changed places")
    return fixture.measured


@check(
    "a request's first tokens read nothing of its slot, even if they are one token, or no prompt",
    _SHORT_AND_LONG,
    covers=of_state("mode:prefill", MEMORY),
)
def slots_start_empty(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture = _admitted(subject, spec)
    for first in (1, QUERY):
        fixture.recycle(4, 2)
        fixture.admit(4, first)
        fixture.admit(2)
        fixture.verify({2: 0}, "first tokens that are no prompt", count=first)
        fixture.verify({2: 1, 4: 2}, "steps in recycled slots")
        fixture.expect_states("in recycled slots")
    return fixture.measured


@check("a step writes the slots of its live rows only", _SHORT_AND_LONG, covers=of_state(MEMORY))
def padding_stays_inert(subject: StateSubject, spec: StateSpec) -> None:
    fixture = _admitted(subject, spec)
    for slot in (2, 4):
        others = [other for other in range(6) if other != slot]
        before = [fixture.content(other) for other in others]
        for absorb in (False, True):
            fixture.verify({slot: _DRAFTS if absorb else 1}, "one live row", absorb=absorb)
        _expect_same(before, [fixture.content(other) for other in others], "slots that are in no live row")
    fixture.expect_states("beside padding rows")


@check(
    "steps of other numbers of tokens, in all rows or in some, continue from the same state",
    _SHORT_AND_LONG,
    covers=of_state("mode:decode", "mode:verify"),
)
def steps_of_any_length_follow(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture = _admitted(subject, spec)
    for count, accepted in ((QUERY, 1), (1, 0), (1, 0), (QUERY, 3), (1, 0), (2, 0), (3, 2)):
        fixture.verify(dict.fromkeys(fixture.texts, accepted), f"a step of {count}", count=count)
        fixture.expect_states(f"after a step of {count}")
    after = fixture.run({2: fixture.tokens(1), 0: fixture.tokens(3), 4: fixture.tokens(QUERY)}, "a mixed step")
    fixture.texts |= {slot: texts[0] for slot, texts in after.items()}
    fixture.expect_states("after a mixed step")
    return fixture.measured


@check(
    "a prompt in chunks of any sizes gives the state of the whole, and steps follow it",
    _specs("base", "kda", "ssd", "conv", "conv_width_2"),
    covers=of_state("mode:prefill", "mode:extend"),
)
def prompts_in_chunks_equal_one(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture, edge = StateFixture(subject, spec), max(1, spec.conv_width - 2)
    fixture.admit(1, 1, edge, QUERY, 63)
    fixture.admit(3, 64, 1, 1, 65)
    fixture.expect_states("after the chunks of prompts")
    fixture.verify({1: 1, 3: 2}, "the step after a prompt")
    # More of the prompt after steps, as when a request is extended.
    fixture.verify({3: edge - 1, 1: edge - 1}, "a chunk after steps", count=edge, absorb=True)
    fixture.expect_states("after a chunk that follows steps")
    return fixture.measured


@check("a copy has the state of the length asked for, and neither slot changes the other", _SHORT_AND_LONG)
def snapshots_are_independent(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture, device = _admitted(subject, spec), subject.device
    after = fixture.run({4: fixture.tokens(QUERY), 2: fixture.tokens(QUERY)}, "a step")
    fixture.texts |= {4: after[4][2], 2: after[2][1], 1: after[4][1], 5: after[2][1]}
    lengths = torch.tensor([fixture.texts[1].length, fixture.texts[5].length], device=device)
    sources, targets = torch.tensor([[4, 2], [1, 5]], device=device).unbind()
    subject.backend.copy(fixture.caches, sources, targets, lengths)
    fixture.expect_states("after a copy")
    for slots_of_rows in ((1, 4), (2, 5)):
        fixture.verify(dict.fromkeys(slots_of_rows, 2), "steps of a copy and its source")
    fixture.expect_states("after steps of copies")
    return fixture.measured


@check(
    "tokens of a tree follow their ancestors, and the accepted path remains",
    _specs("base", "long_journal", "ssd", "conv", tree=True),
)
def trees_follow_the_path(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture = _admitted(subject, spec)
    for turn in range(3):
        after = fixture.run({slot: fixture.tokens(len(_TREE)) for slot in fixture.texts}, "a tree", parents=_TREE)
        fixture.accept_paths({slot: _PATHS[(row + turn) % 4] for row, slot in enumerate(after)}, after)
        fixture.expect_states("after a tree")
        fixture.verify(dict.fromkeys(fixture.texts, turn), "a chain after a tree")
    return fixture.measured


@check("steps of unverified tokens follow one another, and the next round forgets them", _SHORT_AND_LONG)
def later_steps_can_be_forgotten(subject: StateSubject, spec: StateSpec) -> Measurements:
    fixture = _admitted(subject, spec)
    for _ in range(4):
        _draft(fixture, fixture.texts)
    return fixture.measured


@check(
    "an advance in a graph gives what a build for the next token gives, and changes nothing else",
    _SHORT_AND_LONG,
    covers=of_state("mode:decode", ADVANCE),
)
def advances_mean_a_rebuild(subject: StateSubject, spec: StateSpec) -> Measurements:
    support = subject.backend.builder.advance_support(spec, subject.device)
    if support.level is not AdvanceLevel.IN_GRAPH:
        raise Unsupported(support.reason)
    fixture = _admitted(subject, spec)
    for slots in ((4, 0, 2), (2,), (0, 4)):
        _draft(fixture, slots, advances=True)
    return fixture.measured


def _draft(fixture: StateFixture, slots: Iterable[int], **how: Any) -> None:
    """Run the steps of a recurrent draft. Raises CheckFailure if the states of the verified tokens change."""
    fixture.verify(dict.fromkeys(slots, 1), "step 0 of a draft", reserve=RESERVE)
    drafts = {slot: fixture.texts[slot] for slot in slots}
    for step in range(RESERVE):
        new = {slot: fixture.tokens(1) for slot in drafts}
        after = fixture.run(new, f"step {step + 1} of a draft", texts=drafts, may_fold=False, **how)
        drafts = {slot: texts[0] for slot, texts in after.items()}
    fixture.expect_states("after a draft's steps")


@check("a state that does not fit the lengths is flagged, its row inert, and its slot as it was", _specs("base"))
def lost_states_are_reported(subject: StateSubject, spec: StateSpec) -> None:
    fixture = _admitted(subject, spec)
    wrong = {"before its checkpoint": -3, "beyond its journal": 2}
    for what, moved in wrong.items():
        text = fixture.texts[4]
        _expect_lost(fixture, {**fixture.texts, 4: Text(text.length + moved, text.layers)}, QUERY, f"a context {what}")
    _expect_lost(fixture, fixture.texts, spec.journal + 1 - QUERY, "a journal too short for a step", may_fold=False)


def _expect_lost(fixture: StateFixture, texts: dict[int, Text], count: int, what: str, **how: Any) -> None:
    """Raise CheckFailure unless slot 4 is lost in a step, and slot 2 not, which starts over with a new request."""
    fixture.lengths.lost.zero_()
    if how:
        fixture.verify({4: QUERY - 1}, "a step that fills part of the journal")
        texts = fixture.texts
    fixture.recycle(2)
    texts = {**texts, 2: Text.empty(fixture.spec, fixture.weights)}
    before = fixture.content(4)
    fixture.run({2: fixture.tokens(count), 4: fixture.tokens(count)}, what, texts=texts, lost=[4], **how)
    lost = fixture.lengths.lost.tolist()
    expect(lost == [0, 0, 0, 0, 1, 0], contract=f"{what} loses the state", expected="slot 4 flagged", got=lost)
    _expect_same([before], [fixture.content(4)], f"the slot of {what}")


@check("every layer of a step reads the same lengths, and none is left out", _SHORT_AND_LONG)
def layers_step_together(subject: StateSubject, spec: StateSpec) -> Measurements:
    with_trees = replace(spec, tree=True)
    if not isinstance(subject.backend.supports(with_trees, subject.device), Rejected):
        spec = with_trees
    fixture = _admitted(subject, spec)
    for accepted in (1, 3, 0):
        fixture.verify(dict.fromkeys(fixture.texts, accepted), "a step of three layers")
        fixture.expect_states("after a step of three layers")
    if spec.tree:
        after = fixture.run({slot: fixture.tokens(len(_TREE)) for slot in fixture.texts}, "a tree", parents=_TREE)
        fixture.accept_paths(dict(zip(after, _PATHS, strict=False)), after)
        fixture.expect_states("after a tree in three layers")
    return fixture.measured


@check(
    "a graph captured over padding and replayed over any batch gives the bits of a step without it",
    _SHORT_AND_LONG,
)
def graph_replays_over_other_batches(subject: StateSubject, spec: StateSpec) -> None:
    replayed, eager = (_admitted(subject, spec) for _ in range(2))
    for slots in ((4, 2), (0,), (2, 0, 4), (4,)):
        new = {slot: replayed.tokens(QUERY) for slot in slots}
        after = [fixture.run(new, "a step", captured=fixture is replayed) for fixture in (replayed, eager)]
        for fixture, texts in zip((replayed, eager), after, strict=True):
            fixture.texts |= {slot: texts[slot][1] for slot in slots}
    for slot in replayed.texts:
        _expect_same([eager.content(slot)], [replayed.content(slot)], "slots, with a graph or without,")


@check(
    "a state after rejected drafts has the bits of one whose tokens were certain",
    _specs("base", "long_journal", "kda", "ssd"),
    covers=only(column("state", StateFeature.BITWISE_ROLLBACK)),
)
def rollback_is_bitwise(subject: StateSubject, spec: StateSpec) -> None:
    if StateFeature.BITWISE_ROLLBACK not in subject.backend.capabilities.features:
        raise Unsupported("does not claim that a rollback keeps bits")
    fixture = StateFixture(subject, spec)
    prompt = fixture.tokens(5)
    for slot in (1, 3):
        fixture.admit(slot, prompt)
    for accepted in (1, 0, 2, 3, 1):
        tokens = fixture.tokens(QUERY)
        kept = tokens._replace(**{name: part[:, : accepted + 1] for name, part in tokens._asdict().items()})
        for slot, new in ((1, tokens), (3, kept)):
            fixture.texts[slot] = fixture.run({slot: new}, "a step", absorb=slot == 3)[slot][accepted]
        length = torch.tensor([fixture.texts[1].length] * 2, device=subject.device)
        slots = torch.tensor([1, 3], device=subject.device)
        for cache in fixture.caches:
            state, window = subject.backend.read(cache, slots, length)
            _expect_same([[state[1], window[1]]], [[state[0], window[0]]], f"after {accepted} accepted drafts")


def _unclaimed(subject: StateSubject) -> Iterable[tuple[str, StateSpec]]:
    """Yield specs outside the capability record, each wrong in one way."""
    able, base = subject.backend.capabilities, subject.base_spec()
    yield "float64", replace(base, dtype=torch.float64)
    yield "state_float64", replace(base, state_dtype=torch.float64)
    yield from ((each.value, varied(base, recurrence=each)) for each in Recurrence if each not in able.recurrences)
    sizes = {"journal": able.journals, "conv_width": able.conv_widths}
    if base.matrices:
        sizes |= {"key_dim": able.key_dims, "value_dim": able.value_dims}
    for field, served in sizes.items():
        beyond = [size for size in (1, 7, 48, 257, 1024) if size not in served]
        for size in beyond:
            change: dict[str, Any] = {field: size}
            yield f"{field}_{size}", replace(base, **change)
    if StateFeature.TREE not in able.features:
        yield "tree", replace(base, tree=True)
    if StateFeature.GROUPED_KEYS not in able.features:
        yield "grouped_keys", replace(base, num_value_heads=2 * base.num_key_heads)


@check("an unclaimed spec is rejected with reasons, and nothing is allocated for it", _unclaimed, covers=only(REFUSALS))
def unclaimed_is_refused(subject: StateSubject, spec: StateSpec) -> None:
    answer = subject.backend.supports(spec, subject.device)
    expect(
        isinstance(answer, Rejected) and len(answer.reasons) > 0 and all(len(reason) > 8 for reason in answer.reasons),
        contract="an unclaimed spec is rejected with reasons",
        expected=f"Rejected(reasons) for [{spec.describe()}]",
        got=answer,
    )
    try:
        subject.backend.allocate_state(spec, 1, 1, subject.device)
    except BatchError:
        return
    raise CheckFailure(contract="nothing is allocated for such a spec", expected="BatchError", got="caches")


@check(
    "tensors of another shape or dtype, and tables of more slots, are rejected, and slots keep their bits",
    _specs("base"),
    covers=only(REFUSALS),
)
def bad_tensors_never_reach_a_kernel(subject: StateSubject, spec: StateSpec) -> None:
    fixture = _admitted(subject, spec)
    fixture.verify({4: 1}, "a step")
    tokens, weights, metadata = fixture.tokens(4 * QUERY), fixture.device_weights[0], fixture.last
    assert metadata is not None
    good = StateInputs(*(part[0].to(subject.device) for part in tokens), *weights)
    given = {name: part for name, part in good._asdict().items() if part is not None}
    wrong = [good._replace(**{name: part.double()}) for name, part in given.items()]
    wrong += [good._replace(**{name: part[:-1]}) for name, part in given.items()]
    if good.skip is None:
        wrong.append(good._replace(skip=torch.zeros(spec.num_value_heads, device=subject.device)))
    cache = fixture.caches[0]
    misfits = [replace(cache, state=cache.state[..., :-1]), replace(cache, key=cache.key.double())]
    before, slots = fixture.content(4), metadata.num_slots
    calls = [*((inputs, cache, metadata) for inputs in wrong), *((good, misfit, metadata) for misfit in misfits)]
    calls.append((good, cache, replace(metadata, num_slots=7)))
    for inputs, own, given_metadata in calls:
        try:
            subject.backend.forward(inputs, own, given_metadata, spec=spec)
        except BatchError:
            continue
        parts = inputs._asdict().items()
        got = {name: (part.dtype, list(part.shape)) for name, part in parts if part is not None}
        raise CheckFailure(
            contract="bad input never reaches a kernel",
            expected="BatchError",
            got=f"a result of {got}, with tables of {given_metadata.num_slots} slots and a cache of {slots}",
        )
    _expect_same([before], [fixture.content(4)], "a slot after rejected calls")


def _expect_same(wanted: Sequence[Sequence[torch.Tensor]], found: Sequence[Sequence[torch.Tensor]], what: str) -> None:
    same = all(torch.equal(*pair) for each in zip(wanted, found, strict=True) for pair in zip(*each, strict=True))
    expect(same, contract=f"{what} keep their bits", expected="no change", got="other bits")
