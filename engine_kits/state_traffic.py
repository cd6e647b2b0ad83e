"""Requests that an engine might serve, drawn at random, and the engine's side of them: who holds which state, when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from engine_kits.hash_recurrence import Slots, sequential

DRAFTS = 4
"""Tokens that a step can draft for a request."""
_ROUNDS = 40
_VOCABULARY = 1000


@dataclass(eq=False)
class DrawnRequest:
    """text: the prompt's tokens, then those accepted. done: the tokens that its state has seen. rejected: drafts that
    its last step rejected, of which a host that runs ahead knows nothing."""

    text: list[int]
    prompt: int
    done: int = 0
    rejected: int = 0

    @property
    def prefilling(self) -> bool:
        return self.done < self.prompt

    def keep(self, step: DrawnStep, drafts: int) -> None:
        """Count a step's tokens, of whose drafts the first `drafts` were accepted."""
        seen = self.done + len(step.tokens) - step.drafts + drafts
        if not self.prefilling:
            self.text[self.done :] = step.tokens
        del self.text[max(seen, self.prompt) :]
        self.done, self.rejected = seen, step.drafts - drafts


@dataclass(frozen=True)
class DrawnStep:
    """A request's tokens in a round. drafts: how many of them, at the end, are drafts."""

    request: DrawnRequest
    tokens: list[int]
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """prompts: their lengths. chunks: what they can be cut into. drafts: how many a step can draft. idle: how likely
    nobody drafts in a round.

    elsewhere: how likely another instance has run a prompt, or all of it but the last token, which then has drafts that
    are no tokens, so that all are rejected. alone: whether prompts have rounds of their own, and no such drafts.
    """

    prompts: tuple[int, ...] = (1, 2, 9, 20)
    chunks: tuple[int, ...] = (30,)
    drafts: tuple[int, ...] = (DRAFTS,)
    idle: float = 0.0
    elsewhere: float = 0.0
    alone: bool = False

    def arrival(self, random: Random) -> DrawnRequest:
        """Draw a request."""
        prompt = random.choice(self.prompts)
        request = DrawnRequest(_tokens(random, prompt), prompt)
        if random.random() < self.elsewhere:
            request.done = prompt - random.randrange(2)
        return request

    def steps(self, random: Random, live: Sequence[DrawnRequest]) -> list[DrawnStep]:
        """Draw a round's steps: some requests rest."""
        idle, prompts = random.random() < self.idle, random.random() < 0.5
        found = [self._step(random, request, idle) for request in live if random.random() < 0.85]
        if self.alone and any(step.request.prefilling is prompts for step in found):
            found = [step for step in found if step.request.prefilling is prompts]
        random.shuffle(found)
        # As schedulers do: what runs already comes before what is new.
        return sorted(found, key=lambda step: not step.request.done)

    def _step(self, random: Random, request: DrawnRequest, idle: bool) -> DrawnStep:
        if not request.prefilling:
            drafts = 0 if idle else random.choice(self.drafts)
            return DrawnStep(request, _tokens(random, 1 + drafts), drafts)
        if self.elsewhere and request.done == request.prompt - 1 > 0 and not (idle or self.alone):
            return DrawnStep(request, request.text[request.done :] + _tokens(random, DRAFTS), DRAFTS)
        end = min(request.prompt, request.done + random.choice(self.chunks))
        return DrawnStep(request, request.text[request.done : end])


class StateEngine(ABC):
    """An engine around one builder of state metadata: for each step it builds, and its stand-ins run over the slots.

    rows: requests that it can hold. moved: tensors that a build has moved away from where a replayed graph reads them.
    """

    rows: int
    slots: Slots

    def __init__(self) -> None:
        self.moved: set[str] = set()

    @abstractmethod
    def admit(self, request: DrawnRequest) -> None:
        """Take a request. If another instance ran its first tokens, put their state where that instance's arrives."""

    @abstractmethod
    def finish(self, request: DrawnRequest) -> None:
        """Forget a request and recycle what it held."""

    @abstractmethod
    def run(self, steps: Sequence[DrawnStep], padding: int) -> None:
        """Run a round. padding: rows to add to it where a graph is replayed."""

    @abstractmethod
    def accept(self, steps: Sequence[DrawnStep], kept: Sequence[int]) -> None:
        """End the round. kept: how many of each step's drafts were accepted."""

    @abstractmethod
    def held(self, request: DrawnRequest) -> tuple[int | None, list[int]]:
        """Return the state, if the layer has one, and the window that the request's next step starts from."""

    @abstractmethod
    def slots_of(self, request: DrawnRequest) -> set[int]:
        """Return the slots that the request's steps may write."""


@dataclass
class Verdict:
    """What was seen. states: how often a request's state was compared. wrong, foreign: each wrong one, and each write
    to a slot of nobody in the round, in words. moved: as in StateEngine."""

    states: int = 0
    wrong: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)


def serve(engine: StateEngine, traffic: Traffic, seed: int = 0) -> Verdict:
    """Serve random requests, and compare each one's state with a sequential run's after every round."""
    random, live, verdict = Random(seed), list[DrawnRequest](), Verdict(moved=engine.moved)
    for number in range(_ROUNDS):
        where = f"round {number}"
        while len(live) < engine.rows and random.random() < 0.6:
            live.append(traffic.arrival(random))
            engine.admit(live[-1])
        if steps := traffic.steps(random, live):
            before = engine.slots.written()
            engine.run(steps, random.randrange(3))
            changed = set((before != engine.slots.written()).any(1).nonzero()[:, 0].tolist())
            if foreign := changed.difference(*(engine.slots_of(step.request) for step in steps)):
                verdict.foreign.append(f"{where}: slots {sorted(foreign)}")
            kept = [0 if step.request.prefilling else random.randint(0, step.drafts) for step in steps]
            engine.accept(steps, kept)
            for step, drafts in zip(steps, kept, strict=True):
                step.request.keep(step, drafts)
            _compare(engine, live, verdict, where)
        if live and random.random() < 0.4:
            engine.finish(live.pop(random.randrange(len(live))))
    return verdict


def _compare(engine: StateEngine, live: Sequence[DrawnRequest], verdict: Verdict, where: str) -> None:
    for request in live:
        if request.done:
            state, window = sequential(request.text[: request.done])
            found, last = engine.held(request)
            what = [] if found in (None, state) else ["state"]
            what += [] if last == window else ["window"]
            verdict.states += 1
            if what:
                verdict.wrong.append(f"{where}: the {' and '.join(what)} of a request after {request.done} tokens")


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(_VOCABULARY) for _ in range(count)]
