"""The multi-step drafter: step 0 over the verified tokens, then K-1 single-token steps by the chosen strategy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from builders import RequestTables, advance_shared_state
from builders.errors import require
from spec_decode.drafter.attention import PagedAttention
from spec_decode.drafter.captures import EXTEND, LOOP, STEP, DraftCaptures
from spec_decode.drafter.config import DrafterConfig
from spec_decode.drafter.kv_groups import KVGroup, build_ragged
from spec_decode.drafter.plan import DraftPlan, Strategy, choose
from spec_decode.drafter.step_buffers import StepBuffers
from spec_decode.drafter.steps import DraftSteps, VerifiedTokens
from spec_decode.graphs import loop_unsupported_reason
from spec_decode.models import DraftModel

__all__ = ["Drafter", "Drafts", "InUse", "VerifiedTokens", "default_capture_sizes"]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Views of the drafter's buffers, good until the next round, of as many columns as the round had tokens: tokens
    int64 [n, K], -1 where a request proposes nothing, and the processed logits fp32 [n, K, V] each was drawn from; what
    stands behind a request's last token is undefined."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class InUse:
    """What the kernels of a phase read in the last round, for whoever looks on: nothing of it may be written to.

    size: rows, padding included. metadata: of each group, as the graphs hold it or as it was built for the round.
    """

    phase: StepBuffers
    size: int
    metadata: tuple[Any, ...]


class Drafter:
    """Proposes K tokens a round for the requests in `tables`, in the strategy that the groups' builders allow."""

    def __init__(
        self,
        model: DraftModel,
        groups: Sequence[KVGroup],
        tables: RequestTables,
        config: DrafterConfig,
    ) -> None:
        """Raises StrategyError for a K below 1 or a forced strategy that a group cannot run, before any allocation."""
        device, num_speculative_tokens = tables.device, config.num_speculative_tokens
        self.plan: DraftPlan = choose(
            [group.facts(device) for group in groups],
            num_speculative_tokens,
            config.graph_mode,
            forced=config.strategy,
            loop_unsupported_reason=loop_unsupported_reason(device),
        )
        sizes = list(config.capture_sizes or default_capture_sizes(tables.max_reqs))
        _check_shapes(groups, tables, num_speculative_tokens, sizes)
        self.model = model
        self.groups = tuple(groups)
        self.tables = tables
        self.num_speculative_tokens = num_speculative_tokens
        self._steps = DraftSteps(
            model,
            groups,
            tables,
            num_speculative_tokens=num_speculative_tokens,
            planned=self.plan.preplanned_groups,
            min_confidence=config.min_confidence,
        )
        self._captures = DraftCaptures(
            self._steps,
            self.plan,
            sizes,
            memory_limit=config.graph_memory_limit,
            extend_in_graph=config.extend_in_graph,
        )
        self.inputs = self._steps.inputs
        self.graphs = self._captures.graphs
        by_the_host = {*self.plan.rebuild_groups, *self.plan.preplanned_groups}
        each_round = {index for index, group in enumerate(self.plan.groups) if group.build_per_round}
        self._built_per_round = sorted(each_round - by_the_host)
        self._rebuilt = sorted(each_round | by_the_host)
        self._rebuilt_at_step_0 = self._rebuilt if self._captures.holds_extend else list(range(len(groups)))
        # What the device was last told: tokens a round, and whether the requests' own lengths may differ from K.
        self._asked = (num_speculative_tokens, False)

    @property
    def drafts(self) -> Drafts:
        """What the last round proposed, in the drafter's own buffers of all rows and K columns."""
        return Drafts(self._steps.sampler.draft_tokens, self._steps.sampler.draft_logits)

    def in_use(self) -> dict[int, InUse]:
        """What step 0 and the last step of the last round read, by the step; the tables must be as they were.

        Waits for the device. A round of one token has no step but 0.
        """
        extend, decode = self._steps.extend, self._steps.decode
        found = {0: self._in_use(extend, extend.metadata, self._rebuilt_at_step_0)}
        if step := int(decode.batch.step):
            found[step] = self._in_use(decode, decode.at_step(step), self._rebuilt)
        return found

    def _in_use(self, phase: StepBuffers, built: Sequence[Any], by_the_host: Collection[int]) -> InUse:
        size = self._padded(self.tables.num_live)
        captured = self._captures.metadata(phase, size) or built
        metadata = (built[i] if i in by_the_host else captured[i] for i in range(len(self.groups)))
        return InUse(phase, size, tuple(metadata))

    @torch.no_grad()
    def propose(self, verified: VerifiedTokens | None = None, num_tokens: int | None = None) -> Drafts:
        """Draft K tokens behind each request's next_token. Nothing in it waits for the device unless the plan says so.

        verified: what the round starts from, copied to `inputs`; None: a verifier wrote it to the live rows there.
        num_tokens: how many this round, 1 to K; None is K. The same tokens in every strategy, and no new capture: the
        device loop, per-step and eager strategies run that many steps, the full loop all K, whose last ones find no
        request that drafts on.

        The requests are the live rows of the tables. One whose limit leaves no room for the 1 + K tokens of step 0
        proposes nothing and raises tables.overflow, as does one that reaches its limit on the way, from there on.
        Raises BatchError, with nothing run, for tensors of another shape, dtype or device, or too large a batch.
        """
        live = self.tables.num_live
        require(
            live > 0,
            "a round needs at least one live request, the tables hold none; nothing was run. Load the tables first.",
        )
        wanted = self.num_speculative_tokens if num_tokens is None else num_tokens
        require(
            1 <= wanted <= self.num_speculative_tokens,
            f"this drafter proposes 1 to {self.num_speculative_tokens} tokens a round, asked for {wanted}; nothing was "
            "run. Make a drafter for more, or leave the drafter out of a round without drafts.",
        )
        size = self._padded(live)
        if verified is not None:
            self._steps.take(verified, live)
        self._ask(wanted, verified)
        if self.plan.strategy is not Strategy.EAGER and not self.graphs.complete:
            self.capture()
            size = self._padded(live)
        self.run_extend(size)
        if wanted > 1:
            self.run_steps(size, wanted)
        drafts = self.drafts
        return Drafts(drafts.tokens[:live, :wanted], drafts.logits[:live, :wanted])

    def run_extend(self, size: int) -> None:
        """Run step 0 of `size` padded rows over the round's inputs."""
        steps = self._steps
        if self._rebuilt_at_step_0:
            steps.begin_extend(size)
            steps.extend.rebuild(size, self._rebuilt_at_step_0)
        if self._captures.holds_extend:
            self._captures.replay(EXTEND, size)
        else:
            steps.extend_forward(size)

    def run_steps(self, size: int, num_tokens: int | None = None) -> None:
        """Run steps 1..num_tokens-1 (None: K-1) of `size` padded rows from the state that step 0 left."""
        count = (num_tokens or self.num_speculative_tokens) - 1
        if self.plan.strategy in (Strategy.DEVICE_LOOP, Strategy.FULL_LOOP):
            self._loop(size)
        elif self.plan.strategy in (Strategy.PER_STEP, Strategy.PIECEWISE):
            self._step_by_step(size, count)
        else:
            self._eagerly(size, count)

    def _loop(self, size: int) -> None:
        decode = self._steps.decode
        decode.rebuild(size, self._built_per_round)
        decode.plan_ahead(size)
        self._captures.replay(LOOP, size)

    def _step_by_step(self, size: int, count: int) -> None:
        decode = self._steps.decode
        decode.rebuild(size, self._built_per_round)
        for _ in range(count):
            advance_shared_state(decode.batch, size)
            decode.rebuild(size, self.plan.rebuild_groups)
            self._captures.replay(STEP, size)

    def _eagerly(self, size: int, count: int) -> None:
        decode = self._steps.decode
        for _ in range(count):
            advance_shared_state(decode.batch, size)
            decode.rebuild(size, range(len(self.groups)))
            self._steps.step_in_place(size, PagedAttention(self.groups, decode.metadata))

    def _ask(self, num_tokens: int, verified: VerifiedTokens | None) -> None:
        """Tell the device how many tokens the round wants, where the last one wanted another number."""
        asked, each_its_own = self._asked
        if asked != num_tokens:
            self._steps.sampler.num_tokens.fill_(num_tokens)
        if verified is not None and verified.draft_lens is None and each_its_own:
            self._steps.sampler.draft_lens.fill_(self.num_speculative_tokens)
        self._asked = (num_tokens, verified is None or verified.draft_lens is not None)

    def _padded(self, live: int) -> int:
        """Every strategy pads alike, so that all run the same shapes; only graphs end at the largest captured one."""
        if self.plan.strategy is Strategy.EAGER and live > self.graphs.sizes[-1]:
            return live
        return self.graphs.padded(live)

    @torch.no_grad()
    def prefill(
        self,
        tables: RequestTables,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        token_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
    ) -> None:
        """Write the draft KV of prompts or parts of them, without drafting; eager, for any lengths.

        tables: these requests alone, over the same caches. Request r has query_lens[r] flat tokens, the last of
        seq_lens[r] in its cache then; token_ids int64 [T] are the tokens one *behind* each position (at it, where the
        model's position_offset is 1), target_hidden_states [T, F] the target's at the token before.
        """
        batch, metadata = build_ragged(self.groups, tables, query_lens, seq_lens)
        hidden = self.model.combine(target_hidden_states.to(self.inputs.target_hidden_states.dtype))
        self.model.forward(token_ids, hidden, batch.positions, PagedAttention(self.groups, metadata))

    def capture(self, *, progress: bool = False) -> None:
        """Capture the graphs that the plan needs, on padding rows alone: nothing of a live request is touched.

        Graphs that are there are kept. Raises CaptureError where the largest batch's do not fit into their memory.
        """
        self._captures.capture(progress=progress)


def default_capture_sizes(max_reqs: int) -> list[int]:
    """Powers of two up to max_reqs, and max_reqs itself."""
    sizes = [1]
    while sizes[-1] * 2 <= max_reqs:
        sizes.append(sizes[-1] * 2)
    return sorted({*sizes, max_reqs})


def _check_shapes(
    groups: Sequence[KVGroup], tables: RequestTables, num_speculative_tokens: int, sizes: Sequence[int]
) -> None:
    require(
        [group.spec.page_size for group in groups] == list(tables.page_sizes_host),
        f"group i of the drafter uses block table i, with page sizes {[g.spec.page_size for g in groups]} against "
        f"the tables' {list(tables.page_sizes_host)}; its slots would be wrong. Make one table per group.",
    )
    require(
        num_speculative_tokens < tables.max_seq_len,
        f"a round of {num_speculative_tokens} draft tokens takes {num_speculative_tokens + 1} places of a request, "
        f"these tables hold {tables.max_seq_len}; no request could draft. Lower K or enlarge the tables.",
    )
    require(
        max(sizes) <= tables.max_reqs,
        f"graphs are captured over the rows of the tables, {tables.max_reqs} here, got a capture size of "
        f"{max(sizes)}; its rows would not exist. Capture smaller sizes or enlarge the tables.",
    )
