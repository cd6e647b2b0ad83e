"""The multi-step drafter: step 0 over the verified tokens, then K - 1 single-token steps by the chosen strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from builders import RequestTables
from builders.devices import on_own_device
from builders.errors import require, require_tensor
from spec_decode.drafter.config import DrafterConfig, check_draft
from spec_decode.drafter.plan import DraftPlan, plan_draft
from spec_decode.drafter.steps import Drafts, make_step
from spec_decode.drafter.strategies import DraftStrategy
from spec_decode.drafter.verified_tokens import VerifiedTokens
from spec_decode.graphs import Capturable, Factory, GraphManager, default_capture_sizes
from spec_decode.model_api import DraftModel
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.paged.step_metadata import StepBuffers

STEP_0, ROUND = "step_0", "round"
"""Graph kinds: step 0, and step 0 together with all later steps."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What the kernels of a step read in the last round; read-only.

    size: rows, including padding. metadata: one per group, as the graphs hold it or as it was built for the round.
    """

    buffers: StepBuffers
    size: int
    metadata: tuple[Any, ...]


class Drafter:
    """Proposes K tokens a round for the requests in `tables`, with a strategy that the groups' builders support."""

    def __init__(
        self,
        model: DraftModel,
        groups: Sequence[KVGroup],
        tables: RequestTables,
        config: DrafterConfig,
        plan: DraftPlan | None = None,
    ) -> None:
        """plan: the result of `plan_draft` for these arguments; None plans here.

        Raises, before any allocation, StrategyError for a forced strategy that a group cannot run, and BatchError for
        groups, a K or capture sizes that do not fit the tables, or a K or tree that the model cannot draft.
        """
        check_draft(model, config)
        _check_tree_specs(model, groups, config)
        self.plan = plan_draft(model, groups, tables.device, config) if plan is None else plan
        sizes = list(config.capture_sizes or default_capture_sizes(tables.max_reqs))
        _check_shapes(groups, tables, sizes)
        self.model = model
        self.groups = tuple(groups)
        self.tables = tables
        self.device = tables.device
        self.num_speculative_tokens = config.num_speculative_tokens
        strategy = self.plan.strategy.implementation
        self.graphs = GraphManager(self.device, sizes, memory_limit=config.graph_memory_limit)
        self._uses_graphs = strategy.uses_graphs
        self._step = make_step(model, groups, tables, config, self.plan)
        self.inputs = self._step.inputs
        self._later: DraftStrategy | None = None
        # Makes the graphs of whole rounds; None if step 0 is not captured with the later steps.
        self._round: Factory | None = None
        if (later := self._step.later) and self.num_speculative_tokens > 1:
            self._later = strategy(later, self.graphs, loop_steps=config.loop_steps)
            self._round = self._later.joined(self._step.capturable) if self._step.captured else None
        # What the device last received: tokens per round, and whether a request's own number can differ from K.
        self._sent = (self.num_speculative_tokens, False)

    @property
    def drafts(self) -> Drafts:
        """The last round's proposals, as views of the drafter's buffers: all rows, K columns."""
        return self._step.drafts(self.tables.max_reqs, self.num_speculative_tokens)

    @property
    def separate_graph_reason(self) -> str | None:
        """Why a round and the target step after it cannot share a graph; None if they can."""
        reason = self._step.uncaptured_reason or self._step.step_0.plan.host_reason
        if reason is None and self._later and self._later.separate_graph_reason:
            return f"the draft's strategy is {self.plan.strategy.value}: {self._later.separate_graph_reason}"
        return reason

    def whole_round(self, size: int) -> Capturable:
        """Return a round of `size` padded rows to capture inside a larger graph, if `separate_graph_reason` is None.

        The drafter's own graphs do not change. Capture with padding rows only.
        """
        return (self._round or self._step.capturable)(size)

    def metadata_in_use(self) -> dict[int, StepMetadata]:
        """Return what step 0 and the last step of the last round read, by step; the tables must not have changed since.

        Syncs with the device. A round of one token has only step 0.
        """
        step_0, size = self._step.step_0, self._padded()
        found = {0: StepMetadata(step_0, size, step_0.metadata_in_use(size, 0))}
        if (later := self._step.later) and (step := int(later.decode.batch.step)):
            found[step] = StepMetadata(later.decode, size, later.decode.metadata_in_use(size, step))
        return found

    @on_own_device
    @torch.no_grad()
    def propose(self, verified: VerifiedTokens | None = None, num_tokens: int | None = None) -> Drafts:
        """Draft K tokens after each request's next_token. Syncs with the device only where the plan says so.

        verified: what the round starts from, copied to `inputs`; None if a verifier already wrote the live rows there.
        num_tokens: how many tokens in sequence this round proposes, 0 to K; None is K. The tokens do not depend on the
        strategy, and no new graph is captured: the full loop runs all K steps, the last ones with no request still
        drafting; the other strategies run only the requested steps. With 0 only step 0 runs: it writes the draft KV of
        the verified tokens, which later rounds attend to.

        The requests are the live rows of the tables. A request with no room for step 0 below its token limit proposes
        nothing and raises tables.overflow; one that reaches its limit during the round does so from there on. The
        model's `round_shape` says how many places a round takes.
        Raises BatchError, with nothing run, for tensors of the wrong shape, dtype or device, or too large a batch.
        """
        live = self.tables.num_live
        require(
            live > 0,
            "a round needs at least one live request, got empty tables. Load the tables first.",
        )
        wanted = self.num_speculative_tokens if num_tokens is None else num_tokens
        require(
            type(wanted) is int and 0 <= wanted <= self.num_speculative_tokens,
            f"num_tokens must be 0 to {self.num_speculative_tokens} for this drafter, got {wanted!r}. Make a drafter "
            "for more.",
        )
        size = self._padded()
        if verified is not None:
            self.inputs.copy_from(verified, live)
        self._send_num_tokens(wanted, verified)
        if self._uses_graphs and not self.graphs.complete:
            self.capture()
            size = self._padded()
        if wanted > 1 and self._round:
            self._step.step_0.replay(self.graphs, ROUND, size)
        else:
            self.launch_step_0(size)
            if wanted > 1:
                self.launch_later_steps(size, wanted)
        return self._step.drafts(live, wanted)

    def launch_step_0(self, size: int) -> None:
        """Run step 0 for `size` padded rows over the round's inputs."""
        step = self._step
        if step.step_0.built_groups:
            step.prepare_step_0(size)
        if self._step.captured:
            step.step_0.replay(self.graphs, STEP_0, size)
        else:
            step.run_step_0(size)

    def launch_later_steps(self, size: int, num_tokens: int | None = None) -> None:
        """Run steps 1 to num_tokens - 1 for `size` padded rows from the state that step 0 left; None is K tokens.

        Raises BatchError, with nothing run, if their only graph includes step 0.
        """
        num_steps = (self.num_speculative_tokens if num_tokens is None else num_tokens) - 1
        if self._later is not None and num_steps > 0:
            self._later.run_later_steps(size, num_steps)

    def _padded(self) -> int:
        return self.graphs.padded(self.tables.num_live, eager=not self._uses_graphs)

    def _send_num_tokens(self, num_tokens: int, verified: VerifiedTokens | None) -> None:
        """Send the device how many tokens the round proposes, if that changed since the last round."""
        sent, has_own_lens = self._sent
        if sent != num_tokens:
            self._step.sampler.num_tokens.fill_(num_tokens)
        if verified is not None and verified.draft_lens is None and has_own_lens:
            self._step.sampler.draft_lens.fill_(self.num_speculative_tokens)
        self._sent = (num_tokens, verified is None or verified.draft_lens is not None)

    @on_own_device
    @torch.no_grad()
    def prefill(
        self,
        tables: RequestTables,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        token_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
    ) -> None:
        """Write the draft KV of prompts or parts of prompts, without drafting; eager, for any lengths.

        tables                 these requests only, over the same caches
        query_lens, seq_lens   the tokens of request r are the last query_lens[r] of the seq_lens[r] cached afterwards
        token_ids              int64 [T], flat: the token one place after each position, or at the position if the
                               model's position_offset is 1
        target_hidden_states   [T, F], the target's states at the token before

        Raises BatchError, with nothing written, for tensors of the wrong shape or lengths that exceed the tables.
        """
        count, size = sum(query_lens), self.model.target_states_size
        require_tensor("token_ids", token_ids, shape=(count,), dtype=torch.int64, device=tables.device)
        require_tensor(
            "target_hidden_states",
            target_hidden_states,
            shape=(count, size),
            dtype=target_hidden_states.dtype,
            device=tables.device,
        )
        states = target_hidden_states.to(self.inputs.target_hidden_states.dtype)
        self._step.prefill(tables, query_lens, seq_lens, token_ids, states)

    @on_own_device
    def capture(self, *, progress: bool = False) -> None:
        """Capture the graphs that the plan needs, with padding rows only: no live request's data is touched.

        Existing graphs are kept. Raises CaptureError if the graphs of the largest batch exceed their memory limit.
        """
        if not self._uses_graphs:
            return
        limits = self.tables.token_limits.clone()
        self.tables.token_limits.zero_()
        try:
            self.graphs.capture(self._capturables(), progress=progress)
        finally:
            self.tables.token_limits.copy_(limits)

    def _capturables(self) -> Mapping[str, Factory]:
        found: dict[str, Factory] = {STEP_0: self._step.capturable} if self._step.captured else {}
        if self._round:
            found[ROUND] = self._round
        elif self._later is not None:
            found |= self._later.capturables()
        return found


def _check_tree_specs(model: DraftModel, groups: Sequence[KVGroup], config: DrafterConfig) -> None:
    if config.tree is None or model.drafts_at_once:
        return
    without = [group.name for group in groups if not group.spec.tree]
    require(
        not without,
        f"the draft runs over a tree, but group {without and without[0]} has a spec without one; its backend would "
        "ignore the tree's mask. Make the groups with tree=True.",
    )


def _check_shapes(groups: Sequence[KVGroup], tables: RequestTables, sizes: Sequence[int]) -> None:
    require(
        [group.spec.page_size for group in groups] == list(tables.page_sizes_host),
        f"group i uses block table i, but the groups have page sizes {[g.spec.page_size for g in groups]} and the "
        f"tables {list(tables.page_sizes_host)}; slots would be wrong. Make one table per group.",
    )
    layers = [layer for group in groups for layer in group.caches]
    require(
        len({*layers}) == len(layers),
        f"a layer belongs to one KV group, but the groups have the layers {sorted(layers)}; one of its caches would "
        "never be written. Correct the model's layer_groups.",
    )
    require(
        max(sizes) <= tables.max_reqs,
        f"a capture size must be at most {tables.max_reqs}, the rows of the tables, got {max(sizes)}. Capture smaller "
        "sizes or enlarge the tables.",
    )
