"""Cases drawn from all that a backend claims: specs and batches in which any two classes of values occur together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import torch

from attn_backends import AttentionBackend, Capabilities, Rejected
from builders import AttentionKind, AttentionSpec
from builders.spec import MAX_TREE_TOKENS, SpecError
from spec_decode.conformance.cases import named_specs, tested_values
from spec_decode.conformance.claimed_axes import BATCH_AXES, MOST_HEADS, Length, claimed_dims, claimed_values, spec_axes
from spec_decode.conformance.covering import Axis, CoveringSearch, Draw, Values
from spec_decode.testing.batches import Batch, Case
from spec_decode.testing.subject import Subject, plain_specs

_COUNTS = {"cpu": (80, 3), "cuda": (48, 4)}
"""Specs to draw on a device, and batches for each. On a GPU kernels are compiled for each spec, in seconds."""
STEPS = 3
"""Tokens by which each drawn request can grow."""


_NEW_KERNELS = 4
"""Kernels that take long to compile and that no named case needs: the most that drawn cases may need."""
_TOKENS, _ELEMENTS = 320, 4_500_000
"""What a case can cost: tokens of all queries; elements of the cache, and of what all queries read of it."""


@dataclass(frozen=True, slots=True)
class DrawnCases:
    """The cases, named by seed and number, and how many of the possible pairs of classes of values occur in them.

    missed: axis and label of each class that no case has: the backend refuses it, or the case would cost too much.
    """

    seed: int
    cases: tuple[tuple[str, Case], ...]
    covered: int
    possible: int
    missed: tuple[tuple[str, str], ...]


def unserved_claims(subject: Subject) -> list[str]:
    """Return what the capability record claims although the backend rejects every spec with it that was tried, with its
    reasons. Raises Unsupported if it rejects every plain spec."""
    maker, able = CaseMaker(subject), subject.backend.capabilities
    return [
        f"{claim} ({maker.refusal(ways[0])})"
        for claim, ways in claimed_values(able).items()
        if all(_served_with(maker, able, way) is None for way in ways)
    ]


def _served_with(maker: CaseMaker, able: Capabilities, way: Values) -> Values | None:
    """Return these values with what else the plainest accepted spec with them must have; None if there is none."""
    plain: list[Values] = [{}, *({"kind": kind, "dtype": dtype} for kind in able.kinds for dtype in able.dtypes)]
    more = [] if "dims" in way else claimed_dims(able)
    others = [*plain, *({**start, "dims": dims} for start in plain[1:] for dims in more)]
    return next((values for other in others if maker.fits(values := {**other, **way})), None)


_seed: ContextVar[int] = ContextVar("seed", default=0)


@contextmanager
def drawn_from(seed: int = 0) -> Iterator[None]:
    """Within this context, cases are drawn from this seed."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def drawn_seed() -> int:
    """Return the seed to draw cases from."""
    return _seed.get()


def drawn(subject: Subject) -> DrawnCases:
    """Return the cases for a backend on a device, the same ones each time.

    An engine's builder gets none: the capability record describes the wrapper around it. Raises Unsupported if the
    backend rejects every plain spec.
    """
    if subject.engine:
        return DrawnCases(0, (), 0, 0, ())
    # Several checks of a backend run on the same cases. A backend need not be hashable.
    of, where = _what_decides(subject.backend), (subject.device, _seed.get())
    for made_of, made_where, made in _made:
        if made_where == where and (made_of is of or (isinstance(of, Capabilities) and made_of == of)):
            return made
    made = _drawn(subject, _seed.get())
    _made.append((of, where, made))
    return made


_made: deque[tuple[object, tuple[torch.device, int], DrawnCases]] = deque(maxlen=16)


def _what_decides(backend: AttentionBackend) -> object:
    """Return the claims if they alone say what the backend serves, else the backend."""
    methods = ("supports", "unsupported_reasons", "compiled_for")
    own = [getattr(getattr(backend, name), "__func__", None) for name in methods]
    return backend.capabilities if own == [getattr(AttentionBackend, name) for name in methods] else backend


def _drawn(subject: Subject, seed: int) -> DrawnCases:
    specs, batches = _COUNTS[subject.device.type]
    random, maker = Random(seed), CaseMaker(subject)
    of_specs = spec_axes(subject.backend.capabilities)
    shuffled = [_shuffled(axis, random) for axis in (*of_specs, *BATCH_AXES)]
    search = CoveringSearch(shuffled, maker.fits, random)
    names = [axis.name for axis in of_specs]
    demanding = _demanding(maker, subject.backend.capabilities)
    starts: list[Draw] = []
    for index in range(specs):
        start = demanding[index // _DEMANDING % len(demanding)] if demanding and not index % _DEMANDING else None
        starts.append(search.draw(names, search.at(start) if start else None))
        maker.compile_for(starts[-1].values)
    cases = []
    for index in range(specs * batches):
        draw = search.draw([axis.name for axis in BATCH_AXES], starts[index % specs])
        cases.append((f"s{seed}-{index:03}", maker.case(draw, Random(f"{seed}-{index}"))))
    return DrawnCases(seed, tuple(cases), search.covered, search.possible, tuple(search.missed()))


_DEMANDING = 8
"""One spec in this many begins with a claim that the plainest spec cannot have, if there is one."""


def _demanding(maker: CaseMaker, able: Capabilities) -> list[Values]:
    """Return the claims that are served only with other dims, dtypes or kinds than the plainest spec's, with those."""
    ways = [ways[0] for ways in claimed_values(able).values() if not any(map(maker.fits, ways))]
    return [served for way in ways if (served := _served_with(maker, able, way)) is not None]


def _shuffled(axis: Axis, random: Random) -> Axis:
    """Return the axis with the values of each class in random order. Sizes with a column of their own come first, so
    that each of them is drawn."""
    columns = {"page_size": tested_values("page_size"), "dims": tested_values("head_dim")}.get(axis.name, [])

    def ordered(values: Sequence[Any]) -> list[Any]:
        drawn = random.sample([*values], len(values))
        sizes = [value[0] if isinstance(value, tuple) and axis.name == "dims" else value for value in drawn]
        first = {size: drawn[place] for place, size in reversed([*enumerate(sizes)]) if size in columns}
        return [*first.values(), *(value for value in drawn if value not in first.values())]

    return Axis(axis.name, {label: ordered(values) for label, values in axis.classes.items()})


_ROWS = 2
"""Requests of a batch whose number is not drawn yet."""


class CaseMaker:
    """Makes specs, batches and cases of drawn values, and knows which of them are possible."""

    def __init__(self, subject: Subject) -> None:
        """Raises Unsupported if the backend rejects every plain spec."""
        self.subject = subject
        base = subject.base_spec()
        self.plain: dict[AttentionKind, AttentionSpec] = {}
        for kind in subject.backend.capabilities.kinds:
            # Without grouped heads too: a backend need not claim those.
            plain = [base] if kind is base.kind else [*plain_specs(kind, base.dtype)]
            plain += [replace(spec, num_q_heads=spec.num_kv_heads) for spec in plain]
            if (
                spec := next((each for each in plain if subject.backend.supports(each, subject.device)), None)
            ) is not None:
                self.plain[kind] = spec
        self.base = base
        self._axes = [axis.name for axis in spec_axes(subject.backend.capabilities)]
        self._specs: dict[tuple[object, ...], AttentionSpec | None] = {}
        self._serves = cache(lambda spec: bool(subject.backend.supports(spec, subject.device)))
        # What named cases compile on a GPU anyway, and what drawn ones have needed since.
        self._compiled = {subject.backend.compiled_for(spec) for spec in (base, *named_specs(subject))}
        self._named = len(self._compiled)

    def fits(self, values: Values) -> bool:
        """Return whether the backend accepts the spec of these values, and a case with it costs little enough."""
        spec = self.spec(values)
        if spec is None or spec.num_q_heads > MOST_HEADS or not self._serves(spec):
            return False
        return self._is_batch(spec, values) and self._is_cheap(spec, values) and self._is_compiled(spec)

    def refusal(self, values: Values) -> str:
        """Return why the backend rejects the spec of these values."""
        spec = self.spec(values)
        answer = None if spec is None else self.subject.backend.supports(spec, self.subject.device)
        return "; ".join(answer.reasons) if isinstance(answer, Rejected) else "no spec has it"

    def spec(self, values: Values) -> AttentionSpec | None:
        """Return the plainest spec that has these values; None if there is none."""
        asked = tuple([values.get(name, ...) for name in self._axes])  # again for each value tried for a batch
        if asked not in self._specs:
            self._specs[asked] = self._made(values)
        return self._specs[asked]

    def _made(self, values: Values) -> AttentionSpec | None:
        plain = self.plain.get(values.get("kind", self.base.kind))
        if plain is None:
            return None
        kv_heads = values.get("num_kv_heads", plain.num_kv_heads)
        head_dim, value_dim = values.get("dims", (plain.head_dim, plain.out_dim))
        mask, window = values.get("mask", "chain"), values.get("window", plain.sliding_window)
        kv_dtype, head_scales = values.get("cache", (None, False))
        try:
            return AttentionSpec(
                kind=plain.kind,
                num_q_heads=kv_heads * values.get("group_size", plain.group_size),
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                page_size=values.get("page_size", plain.page_size),
                dtype=values.get("dtype", plain.dtype),
                kv_dtype=kv_dtype,
                head_scales=head_scales,
                sliding_window=window,
                scale=values.get("scale", 1.0) * head_dim**-0.5,
                soft_cap=values.get("soft_cap"),
                sinks=values.get("sinks", plain.sinks),
                causal=mask != "block",
                tree=mask == "tree",
                batch_invariant=values.get("batch_invariant", False),
            )
        except SpecError:
            return None

    def case(self, draw: Draw, random: Random) -> Case:
        """Return the case of a draw that fits."""
        spec = self.spec(draw.values)
        assert spec is not None
        longest, rows = self._longest(spec, draw.values), draw.values.get("rows", _ROWS)
        room, width = draw.values.get("room", (1, 1))
        batch = self._batch(spec, draw.values, longest, random)
        sick = random.randrange(rows) if draw.values.get("neighbour") and rows > 1 else None
        return Case(
            spec,
            batch,
            limit=longest * room + STEPS,
            width=width,
            sick=sick,
            other=self._other(spec, batch, longest, random) if batch.uniform else None,
        )

    def _batch(self, spec: AttentionSpec, values: Values, longest: int, random: Random) -> Batch:
        rows, padding = values.get("rows", _ROWS), values.get("padding", 0)
        shape, tokens = values.get("query", ("uniform", 1))
        queries = [tokens] * rows
        if shape == "balanced":
            queries[random.randrange(rows)] += padding
        elif shape != "uniform":
            queries = [random.randint(1, tokens) for _ in queries]
            queries[0], queries[-1] = tokens, 1  # of different lengths
        lengths = [query if shape == "prompts" else _length(spec, query, longest, random) for query in queries]
        if shape != "prompts":
            lengths[random.randrange(rows)] = longest
        if shape == "uniform" and tokens == 1 and longest >= spec.page_size:  # an advance of it begins a page
            last = spec.page_size * random.randint(1, longest // spec.page_size) - random.randint(0, STEPS - 1)
            lengths[random.randrange(rows)] = last
        lengths = [max(pair) for pair in zip(queries, lengths, strict=True)]
        tail = random.randint(1, 5) if padding and shape not in ("uniform", "balanced") else 0
        trees = _trees(queries, random) if spec.tree else ()
        return Batch(tuple(queries), tuple(lengths), rows + padding, trees, tail)

    def _other(self, spec: AttentionSpec, batch: Batch, longest: int, random: Random) -> Batch:
        """Return a batch with the same rows for the same graph: other requests, more or fewer, of other lengths."""
        query = batch.query_lens[0]
        queries = [query] * random.randint(1, batch.rows)
        lengths = tuple(_length(spec, query, longest, random) for _ in queries)
        return Batch(tuple(queries), lengths, batch.rows, _trees(queries, random) if spec.tree else ())

    def _is_batch(self, spec: AttentionSpec, values: Values) -> bool:
        (shape, tokens), rows = values.get("query", ("uniform", 1)), values.get("rows", _ROWS)
        if shape != "uniform" and rows == 1:
            return False
        if shape == "balanced" and values.get("padding") == 0:
            return False
        if "length" in values and values["length"].windows and spec.sliding_window is None:
            return False
        return not spec.tree or tokens <= MAX_TREE_TOKENS

    def compile_for(self, values: Values) -> None:
        """Count the kernels of the spec of these values as compiled."""
        if (spec := self.spec(values)) is not None:
            self._compiled.add(self.subject.backend.compiled_for(spec))

    def _is_compiled(self, spec: AttentionSpec) -> bool:
        """Return whether it needs no new kernels that take long to compile, or there may still be some."""
        if self.subject.device.type != "cuda" or len(self._compiled) - self._named < _NEW_KERNELS:
            return True
        return self.subject.backend.compiled_for(spec) in self._compiled

    def _longest(self, spec: AttentionSpec, values: Values) -> int:
        length: Length = values.get("length", Length(0))
        shape, query = values.get("query", ("uniform", 1))
        query += values.get("padding", 0) if shape == "balanced" else 0
        tokens: int = length.tokens + length.pages * spec.page_size + length.windows * (spec.sliding_window or 0)
        return max(int(query), tokens)

    def _is_cheap(self, spec: AttentionSpec, values: Values) -> bool:
        rows = values.get("rows", _ROWS) + values.get("padding", 0)
        room, width = values.get("room", (1, 1))
        limit = self._longest(spec, values) * room + STEPS
        pages = -(-limit // spec.page_size)
        (_, tokens) = values.get("query", ("uniform", 1))
        kept = rows * pages * spec.page_size * spec.num_kv_heads * (spec.head_dim + spec.out_dim)
        # Some builders list the slots of each token's window.
        seen = max(limit, spec.sliding_window or 0)
        read = rows * tokens * seen * max(spec.num_kv_heads * spec.head_dim, spec.num_q_heads)
        return bool(rows * tokens <= _TOKENS and max(kept, read, rows * pages * width) <= _ELEMENTS)


def _length(spec: AttentionSpec, query: int, longest: int, random: Random) -> int:
    """Return a length from a query's own to the longest, often at the edge of a page or of the window."""
    page = spec.page_size * random.randint(1, max(1, longest // spec.page_size))
    edges = [query, page, page + 1, page - 1, (spec.sliding_window or page) + random.randint(-1, query)]
    return min(longest, max(query, random.choice([*edges, random.randint(1, longest)])))


def _trees(queries: Sequence[int], random: Random) -> tuple[tuple[int, ...], ...]:
    """Return a random tree for each query: the parent of each token but the first."""
    return tuple(tuple(random.randrange(max(0, token - 5), token) for token in range(1, n)) for n in queries)
