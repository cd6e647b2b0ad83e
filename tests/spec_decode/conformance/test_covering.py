"""Draws in which any two classes of values occur together."""

from itertools import combinations
from random import Random

from spec_decode.conformance.covering import Axis, CoveringSearch, Values

AXES = [Axis(name, {label: [f"{name}{label}{n}" for n in range(2)] for label in "xyz"}) for name in "abcd"]
NAMES = [axis.name for axis in AXES]


def anything(values: Values) -> bool:
    return True


def pairs_in(draws: list[Values]) -> set[tuple[str, str]]:
    """The pairs of classes: the first two letters of a value are its axis and its class."""
    return {pair for draw in draws for pair in combinations(sorted(value[:2] for value in draw.values()), 2)}


def test_few_draws_cover_every_pair_and_value() -> None:
    search = CoveringSearch(AXES, anything, Random(0))
    draws = [search.draw(NAMES).values for _ in range(16)]
    assert len(pairs_in(draws)) == search.covered == search.possible == 6 * 9
    assert {value for draw in draws for value in draw.values()} == {
        value for axis in AXES for values in axis.classes.values() for value in values
    }
    assert search.missed() == []


def test_impossible_class_is_missed_without_its_pairs() -> None:
    def fits(values: Values) -> bool:
        return not str(values.get("a")).startswith("az") and (values.get("b"), values.get("c")) != ("bx0", "cx0")

    search = CoveringSearch(AXES, fits, Random(0))
    draws = [search.draw(NAMES).values for _ in range(24)]
    assert search.missed() == [("a", "z")] and all(fits(draw) for draw in draws)
    assert search.covered == search.possible == 6 * 9 - 9


def test_extended_draw_keeps_values_and_adds_pairs() -> None:
    search = CoveringSearch(AXES, anything, Random(0))
    start = search.draw(["a", "b"])
    more = search.draw(["c", "d"], start)
    assert {name: more.values[name] for name in "ab"} == start.values and set(more.values) == set(NAMES)
    assert search.covered == 6
    assert search.draw(["d"], search.at({"a": "ay1"})).values["a"] == "ay1"


def test_same_seed_gives_same_draws() -> None:
    found = [[CoveringSearch(AXES, anything, Random(seed)).draw(NAMES) for _ in range(4)] for seed in (3, 3, 4)]
    assert found[0] == found[1] != found[2]
