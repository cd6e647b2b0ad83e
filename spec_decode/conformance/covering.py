"""Draws that cover pairs: few assignments of values to axes in which any two classes of values occur together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle
from random import Random
from typing import Any, NamedTuple

Values = dict[str, Any]
"""A value for some of the axes, by the axis's name."""

_DEALS = 3
"""Values of a class to try before the class counts as impossible next to the values chosen so far."""
_NEW_VALUE = 6
"""New pairs that a value in no draw yet is worth."""
_FIRST_PAIRS = 8
"""Open pairs to try as the first of a draw."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What a draw chooses one value of. classes: values that the same code is likely to serve, by a label; each class
    has at least one, and its values are dealt in their order, again and again."""

    name: str
    classes: Mapping[str, Sequence[Any]]


class Place(NamedTuple):
    """A class of an axis, by their indices."""

    axis: int
    label: int


class Draw(NamedTuple):
    """The values chosen for some axes, and the class of each."""

    values: Values
    places: tuple[Place, ...]


class CoveringSearch:
    """Makes draws one by one. Each begins with a pair of classes that no earlier draw has, and then gets the other axes
    in random order, from each the class with the most new pairs and values."""

    def __init__(self, axes: Sequence[Axis], fits: Callable[[Values], bool], random: Random) -> None:
        """fits: whether a draw is possible that has chosen only these values yet."""
        self.axes = axes
        self._fits, self._random = fits, random
        self._decks: dict[Place, Iterator[Any]] = {}
        self._unused: dict[Place, set[Any]] = {}
        """The values of each class that are in no draw yet."""
        for axis, each in enumerate(axes):
            for label, values in enumerate(each.classes.values()):
                self._decks[Place(axis, label)], self._unused[Place(axis, label)] = cycle(values), {*values}
        pairs = [pair for pair in combinations(self._decks, 2) if pair[0].axis != pair[1].axis]
        self._open = dict.fromkeys(random.sample(pairs, len(pairs)))
        self.covered = 0
        """Pairs of classes that the draws have."""
        self._seen: set[Place] = set()

    @property
    def possible(self) -> int:
        """Pairs of classes, without those that were found to fit no draw."""
        return self.covered + len(self._open)

    def draw(self, axes: Sequence[str], start: Draw | None = None) -> Draw:
        """Return a draw that chooses values for these axes, starting from another draw's. An axis without a value that
        fits stays unset."""
        chosen = [index for index, axis in enumerate(self.axes) if axis.name in axes]
        values, places = (dict(start.values), [*start.places]) if start else self._first_pair({*chosen})
        for axis in self._random.sample(chosen, len(chosen)):
            if all(place.axis != axis for place in places):
                self._choose(axis, values, places)
        for pair in combinations(sorted(places), 2):
            if pair in self._open:
                del self._open[pair]
                self.covered += 1
        self._seen.update(places)
        for place in places:
            self._unused[place].discard(values[self.axes[place.axis].name])
        return Draw(values, tuple(places))

    def at(self, values: Values) -> Draw:
        """Return a draw of these values, each in the first class that has it, to start another one from."""
        places = [
            next(Place(index, at) for at, each in enumerate(axis.classes.values()) if values[axis.name] in each)
            for index, axis in enumerate(self.axes)
            if axis.name in values
        ]
        return Draw(values, tuple(places))

    def missed(self) -> list[tuple[str, str]]:
        """Return the axis and label of each class that is in no draw."""
        return [
            (axis.name, label)
            for index, axis in enumerate(self.axes)
            for at, label in enumerate(axis.classes)
            if Place(index, at) not in self._seen
        ]

    def _first_pair(self, axes: set[int]) -> tuple[Values, list[Place]]:
        """Choose values for a pair that no draw has. Pairs that do not fit are dropped."""
        tried = 0
        for pair in [*self._open]:
            if not {place.axis for place in pair} <= axes:
                continue
            for _ in range(_DEALS):
                values = {self.axes[place.axis].name: next(self._decks[place]) for place in pair}
                if self._fits(values):
                    return values, [*pair]
            del self._open[pair]
            tried += 1
            if tried == _FIRST_PAIRS:
                break
        return {}, []

    def _choose(self, axis: int, values: Values, places: list[Place]) -> None:
        def gain(place: Place) -> tuple[bool, int]:
            # A class that no draw has is worth more than any number of pairs, and a value as much as a few.
            new = sum(((place, other) if place < other else (other, place)) in self._open for other in places)
            return place not in self._seen, new + _NEW_VALUE * bool(self._unused[place])

        candidates = [Place(axis, label) for label in range(len(self.axes[axis].classes))]
        self._random.shuffle(candidates)
        for place in sorted(candidates, key=gain, reverse=True):
            for _ in range(_DEALS):
                value = next(self._decks[place])
                if self._fits({**values, self.axes[axis].name: value}):
                    values[self.axes[axis].name] = value
                    places.append(place)
                    return
