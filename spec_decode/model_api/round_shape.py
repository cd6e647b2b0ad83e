"""The places of a request that a round takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from builders.errors import require

if TYPE_CHECKING:
    from spec_decode.trees import Tree


class RoundShape(NamedTuple):
    """What a round takes of a request's places in its tables.

    step_0_len  tokens per row of step 0
    places      places that a request must have for any round
    slots       the most KV slots that the draft writes past the end of a text
    """

    step_0_len: int
    places: int
    slots: int


def require_choices(tree: Tree, num_choices: int) -> None:
    """Raise BatchError for a tree with more choices after a token than a draft has."""
    require(
        tree.max_children <= num_choices,
        f"a tree can have at most {num_choices} choices after a token, all that the draft has, got "
        f"{tree.max_children}. Pass fewer choices.",
    )
