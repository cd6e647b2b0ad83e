"""The settings of a drafter, and the check that a draft model can serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from builders.errors import require, require_counts, require_type, require_types
from spec_decode.drafter.strategies import Strategy
from spec_decode.model_api import DraftModel
from spec_decode.paged.metadata_plan import GraphMode
from spec_decode.trees import Tree


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """How a drafter drafts.

    Raises BatchError for a K below 1, a min_confidence outside [0, 1), a value that does not have its annotated type,
    or a tree that does not fit K.
    """

    num_speculative_tokens: int
    """K: the most tokens that a round proposes."""
    graph_mode: GraphMode = GraphMode.FULL
    strategy: Strategy | None = None
    """None picks the strategy with the least host work that every group supports."""
    capture_sizes: Sequence[int] | None = None
    """Batch sizes, in requests, to capture graphs for; None uses `default_capture_sizes`."""
    min_confidence: float = 0.0
    """A request stops drafting after a token with a lower draft probability than this, at the request's temperature."""
    graph_memory_limit: int | None = None
    """Memory budget of the graphs in bytes; capture sizes that exceed it are skipped."""
    tree: Tree | None = None
    """Draft a tree per request, at most K tokens deep, instead of a chain of K tokens."""
    step_0_in_graph: bool = True
    """False runs step 0 eagerly and the later steps as planned, for comparison; the tokens are the same."""

    loop_steps: int = 1
    """Later steps that a device loop runs before it checks again whether any request still drafts. A check costs the
    device 5 to 8 us (measured on an H200); each unneeded step costs a whole step."""

    def __post_init__(self) -> None:
        require_types(self)
        require_counts("capture_sizes", self.capture_sizes or ())
        require(
            self.capture_sizes is None or len(self.capture_sizes) > 0,
            "capture_sizes is empty. Pass batch sizes, leave it out for the default ones, or pass graph_mode none for "
            "no graphs.",
        )
        require(
            self.num_speculative_tokens >= 1,
            f"num_speculative_tokens must be 1 or more, got {self.num_speculative_tokens}. To decode without drafts, "
            "leave the drafter out; LLM also takes 0.",
        )
        require(
            self.loop_steps > 0,
            f"loop_steps must be 1 or more, got {self.loop_steps!r}; the loop would never advance. Pass 1 to check "
            "after every step.",
        )
        require(
            0.0 <= self.min_confidence < 1.0,
            f"min_confidence must be a probability below 1, got {self.min_confidence}; every draft would end at its "
            "first token. Pass 0 to ignore confidence.",
        )
        self._check_tree()

    def _check_tree(self) -> None:
        if self.tree is None:
            return
        self.tree.require_depth(self.num_speculative_tokens)
        require(
            self.min_confidence == 0.0,
            f"min_confidence is {self.min_confidence}, but a tree keeps its most probable paths at any confidence. "
            "Pass 0, or no tree.",
        )


_SIZES = ("vocab_size", "hidden_size", "target_states_size", "max_positions")
"""What every draft says of itself: see DraftModel."""


def check_draft(model: DraftModel, config: DrafterConfig) -> None:
    """Raise BatchError if the model cannot propose that many tokens or draft that tree, or for arguments of the wrong
    type."""
    require_type("model", model, DraftModel)
    require_type("config", config, DrafterConfig)
    for name in _SIZES:
        size = getattr(model, name, None)
        require(
            type(size) is int and size >= 1,
            f"{type(model).__name__}.{name} must be an int of 1 or more, got {size!r}. Set it in the draft's __init__.",
        )
    model.round_shape(config.num_speculative_tokens, config.tree)
