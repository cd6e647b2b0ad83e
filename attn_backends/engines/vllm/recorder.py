"""What the full graphs of a vLLM speculator read, compared with the batch after some of its rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

from attn_backends.engines.vllm.compat import AttentionGroup, CUDAGraphMode, init_logger, set_current_vllm_config
from attn_backends.engines.vllm.differences import Difference, Round, compare, first_difference
from attn_backends.engines.vllm.pace import Pace

_log = init_logger("vllm.attn_backends")


class RoundRecorder:
    """Records one speculator: `keep` while `capturing`, then `graph` in a `round`, at whose end it compares.

    rounds: comparisons so far. pace: when the next one is due. found: the first difference. paused: suspends comparing.
    """

    def __init__(self, speculator: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.speculator, self.rounds, self.paused, self.pace = speculator, 0, False, Pace(clock)
        self.found: Difference | None = None
        self._is_capturing = False
        self._captured: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._addresses: dict[str, int] = {}
        self._groups: list[list[AttentionGroup]] = []
        self._replayed: Round | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Collect the metadata that vLLM passes to its graphs while it captures; each graph uses the last of its
        shape."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False
        self._addresses = self._buffers()
        if self._captured:
            # At start-up, because they need workspaces: later, the KV cache may leave no memory for these.
            self._groups = _second_builders(self.speculator)
        else:
            kind = type(self.speculator).__name__
            _log.warning("No draft metadata is compared: %s captured no graph that updates its metadata.", kind)

    def keep(self, forward: Callable[[], tuple[tuple[int, int], Mapping[str, Any] | None]]) -> None:
        """Keep a forward's metadata, by its graph's key, if it is captured or warms up for a capture."""
        if self._is_capturing:
            key, metadata = forward()
            if metadata is not None:
                self._captured[key] = metadata

    @contextmanager
    def round(self) -> Iterator[None]:
        """Frame a round; at its end, compare what `graph` took."""
        self._replayed = None
        yield
        if self._replayed and self._replayed.key in self._captured:
            self._compare(self._replayed)

    def graph(self, replayed: Callable[[], Round | None]) -> None:
        """Take the round that a graph replays, None for another forward, if it is time to compare."""
        if not (self.paused or self.found) and self.pace.due:
            self._replayed = replayed()

    def _compare(self, done: Round) -> None:
        """Compare, and log the first difference."""
        # Detecting a dummy reads from the device, which can still be busy: the wait counts.
        begin = self.pace.clock()
        is_dummy = self._is_dummy(done)
        if not is_dummy:
            self.found = next(self._differences(done), None)
            self.rounds += 1
        self.pace.ended(begin)
        if self.found:
            _log.error(
                "Draft metadata differs from the batch: group %s, step %d, field %s: %s (comparison %d). From here on "
                "drafts may be wrong, and only a lower acceptance rate would show it. Comparing ends here.",
                *self.found,
                self.rounds,
            )
        elif not is_dummy and self.rounds & (self.rounds - 1) == 0:
            _log.info("Draft metadata of %d rounds was compared with a fresh build: no difference.", self.rounds)

    def _is_dummy(self, done: Round) -> bool:
        """Return whether these are not requests: vLLM runs such batches to warm up, and alongside other ranks."""
        return not done.num_reqs or bool((self.speculator.idx_mapping[: done.num_reqs] < 0).any())

    def _differences(self, done: Round) -> Iterator[Difference]:
        for name, address in self._buffers().items():
            if address != self._addresses[name]:
                yield Difference("all", done.step, name, "the graph reads the captured buffer, vLLM fills another one")
        slots = self._slots(done) if done.step else None
        if slots is not None and self.speculator.advance_draft_positions:
            inputs, live = self.speculator.input_buffers, slice(done.num_reqs)
            lens = {"seq_lens": (inputs.seq_lens[live], inputs.positions[live].int() + 1)}
            slots_now = self.speculator.block_tables.slot_mappings
            rows = {f"slot_mappings[{i}]": (slots_now[i, live], slots[i, live]) for i in range(len(slots))}
            for name, (found, wanted) in {**lens, **rows}.items():
                for field, what in first_difference(name, found, wanted):
                    yield Difference("all", done.step, field, what)
        captured, fresh = self._captured[done.key], self._fresh(done, slots)
        for group in chain.from_iterable(self._groups):
            layer = group.layer_names[0]
            for field, what in compare(captured[layer], fresh[layer], done):
                yield Difference(f"{group.backend.get_name()} ({layer})", done.step, field, what)

    def _buffers(self) -> dict[str, int]:
        """Return the addresses of the buffers that vLLM fills for each round."""
        inputs, tables = self.speculator.input_buffers, self.speculator.block_tables
        named = {name: getattr(inputs, name) for name in ("seq_lens", "query_start_loc", "positions")}
        named |= {f"block table {i}": table for i, table in enumerate(tables.input_block_tables)}
        return {name: tensor.data_ptr() for name, tensor in {**named, "slot_mappings": tables.slot_mappings}.items()}

    def _slots(self, done: Round) -> torch.Tensor:
        """Recompute vLLM's slots of the batch."""
        speculator, rows = self.speculator, done.num_reqs
        slots: torch.Tensor = speculator.block_tables.compute_slot_mappings(
            speculator.idx_mapping[:rows],
            speculator.input_buffers.query_start_loc[: rows + 1],
            speculator.input_buffers.positions[:rows],
            done.padded,
            out=torch.empty_like(speculator.block_tables.slot_mappings),
        )
        return slots

    def _fresh(self, done: Round, slots: torch.Tensor | None) -> Mapping[str, Any]:
        """Build vLLM's metadata for the batch without updates, with builders that no graph uses."""
        speculator = self.speculator
        desc = _Desc(done.padded * done.query_len, done.padded)
        saved = speculator.attn_groups, speculator.draft_max_seq_len
        # A graph keeps the maximum length of its capture.
        speculator.attn_groups, speculator.draft_max_seq_len = self._groups, speculator.max_model_len
        try:
            built: Mapping[str, Any] = speculator._build_attn_metadata(
                num_reqs=done.num_reqs,
                batch_desc=desc,
                query_start_loc_np=speculator.arange_np[: done.num_reqs + 1] * done.query_len,
                seq_lens_cpu_upper_bound=done.seq_lens_cpu_upper_bound,
                step=done.step,
                causal=getattr(speculator, "_group_causal", True),
                slot_mappings=slots,
            )
        finally:
            speculator.attn_groups, speculator.draft_max_seq_len = saved
            for group in chain.from_iterable(self._groups):
                builder: Any = group.get_metadata_builder()
                # Plans of every batch size would add up, in memory that vLLM has not reserved.
                if hasattr(builder, "forget_plans"):
                    builder.forget_plans()
        return built


class _Desc(NamedTuple):
    """The fields of vLLM's graph description that a build reads."""

    num_tokens: int
    num_reqs: int
    cg_mode: CUDAGraphMode = CUDAGraphMode.FULL


def _second_builders(speculator: Any) -> list[list[AttentionGroup]]:
    """Return the speculator's groups with separate builders, in the workspaces of the first."""
    with set_current_vllm_config(speculator.attn_vllm_config):
        return [[_second(speculator, group) for group in groups] for groups in speculator.attn_groups]


def _second(speculator: Any, group: AttentionGroup) -> AttentionGroup:
    first: Any = group.get_metadata_builder()
    second = AttentionGroup(group.backend, group.layer_names, group.kv_cache_spec, group.kv_cache_group_id)
    block = first.kv_cache_spec.block_size
    second.create_metadata_builders(speculator.attn_vllm_config, speculator.device, kernel_block_size=block)
    second.kernel_block_stride = group.kernel_block_stride
    builder: Any = second.get_metadata_builder()
    if hasattr(first, "aot_schedule"):  # `DFlashSpeculator.set_attn` decides it
        builder.aot_schedule = first.aot_schedule
    if hasattr(first, "set_workspace_buffer"):
        builder.set_workspace_buffer(first._get_workspace_buffer())
    return second
