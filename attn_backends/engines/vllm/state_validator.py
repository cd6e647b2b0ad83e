"""Validation of a hybrid target's recurrent states in a served vLLM: ATTN_BACKENDS_VALIDATE=1, for vLLM's V2 runner.

vLLM keeps a block for each state that a verification can end in, and a count that says which of them is the last
accepted one. If a block or the count is wrong, nothing fails: the request continues another text. After some of the
steps, what vLLM's builders made for the step is compared with what must hold for it: see `StateRecorder`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from attn_backends.engines.vllm import hooks
from attn_backends.engines.vllm.compat import (
    CUDAGraphMode,
    MambaHybridModelState,
    MambaSpec,
    init_logger,
)
from attn_backends.engines.vllm.differences import Difference, tensors_of
from attn_backends.engines.vllm.hooks import Read, Run
from attn_backends.engines.vllm.pace import Pace

_log = init_logger("vllm.attn_backends")


class _Step(NamedTuple):
    """A step before the compared one. Row by row: the request's index int64 [n], the tokens before the step int64 [n],
    and whether it ran prompt tokens bool [n]."""

    request: torch.Tensor
    context: torch.Tensor
    prompt: torch.Tensor


class StateRecorder:
    """Compares two steps at a time, for one model state of vLLM's.

    - A step's live rows have distinct blocks, none of them vLLM's null block.
    - The count of accepted tokens is that by which the request has grown since the step before, and 1 behind prompt
      tokens and for a new request.
    - What a replayed graph reads was built at the addresses of its capture.

    rounds: comparisons so far. found: the first difference. paused: suspends comparing.
    """

    def __init__(self, state: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rounds, self.paused, self.pace = 0, False, Pace(clock)
        self.found: Difference | None = None
        self._state = state
        self._captured: dict[tuple[int, int], dict[str, int]] = {}
        self._before: _Step | None = None
        self._added: set[int] = set()
        mode = state.vllm_config.cache_config.mamba_cache_mode
        self._compares = mode == "none"
        if not self._compares:
            _log.warning("The target's recurrent states are not compared: mamba_cache_mode is %s.", mode)

    def added(self, index: int) -> None:
        """Take note that another request has this index from now on."""
        self._added.add(index)

    def built(self, metadata: Mapping[str, Any], call: Any) -> None:
        """Take a step's metadata, by layer, and the arguments that it was built from."""
        batch, groups = call.input_batch, _state_groups(call.attn_groups)
        if not (self._compares and groups):
            return
        key = (batch.num_reqs_after_padding, batch.num_tokens_after_padding)
        if call.for_capture:
            self._captured[key] = _addresses(metadata, groups)
            return
        before, self._before = self._before, None
        if not (self.paused or self.found) and (before is not None or self.pace.due):
            begin = self.pace.clock()
            # vLLM's warm-ups, and its runs alongside other ranks, have the indices of requests, but no prompts.
            if batch.num_reqs and batch.prefill_len_np[: batch.num_reqs].all():
                step = _step(batch)
                if before is None:
                    self._before, self._added = step, set()
                else:
                    graph = self._captured.get(key) if call.cudagraph_mode == CUDAGraphMode.FULL else None
                    self._compare(before, step, metadata, groups, graph)
            self.pace.ended(begin)

    def _compare(
        self,
        before: _Step,
        step: _Step,
        metadata: Mapping[str, Any],
        groups: list[Any],
        graph: dict[str, int] | None,
    ) -> None:
        built = _addresses(metadata, groups) if graph else {}
        moved = [name for name, address in (graph or {}).items() if built.get(name) != address]
        differences = [Difference("all", 0, name, "a graph reads the captured tensor, not this") for name in moved[:1]]
        accepted = self._accepted(before, step)
        differences += _count_differences("all", self._state.num_accepted_tokens_gpu[step.request], accepted)
        for group in groups:
            layer = group.layer_names[0]
            differences += _of_group(
                f"{group.backend.get_name()} ({layer})", metadata[layer], len(step.request), accepted
            )
        self.rounds += 1
        if differences:
            self.found = differences[0]
            name, _, field, what = self.found
            _log.error(
                "Recurrent states differ from the batch: group %s, field %s: %s (comparison %d). From here on requests "
                "may continue other texts. Comparing ends here.",
                *(name, field, what, self.rounds),
            )
        elif self.rounds & (self.rounds - 1) == 0:
            _log.info("Recurrent states of %d steps were compared: no difference.", self.rounds)

    def _accepted(self, before: _Step, step: _Step) -> list[int | None]:
        """Return the accepted tokens of each row's last step, as the kernels count them: None where they are not known,
        because the request was not in the step before."""
        last = zip(before.request.tolist(), before.context.tolist(), before.prompt.tolist(), strict=True)
        known = {index: None if prompt else context for index, context, prompt in last}
        found: list[int | None] = []
        for index, context in zip(step.request.tolist(), step.context.tolist(), strict=True):
            if index in self._added or (index in known and known[index] is None):
                found.append(1)
            else:
                earlier = known.get(index)
                found.append(None if earlier is None else context - earlier)
        return found


recorder_of = partial(hooks.kept_recorder, StateRecorder)


def install() -> None:
    """Wrap vLLM's model state of hybrid targets, once. Raises UnsupportedVllm if it is not vLLM's own."""
    hooks.install(_HOOKS, "hybrid targets", recorder_of)


def _add_request(recorder: StateRecorder, run: Run, read: Read) -> Any:
    recorder.added(read().req_index)
    return run()


def _prepare_attn(recorder: StateRecorder, run: Run, read: Read) -> Any:
    metadata = run()
    recorder.built(metadata, read())
    return metadata


_HOOKS: hooks.Hooks = {
    MambaHybridModelState: {
        "add_request": (_add_request, "req_index"),
        "prepare_attn": (_prepare_attn, "input_batch cudagraph_mode attn_groups for_capture"),
    }
}


def _state_groups(groups: list[list[Any]]) -> list[Any]:
    return [group for several in groups for group in several if isinstance(group.kv_cache_spec, MambaSpec)]


def _step(batch: Any) -> _Step:
    rows = batch.num_reqs
    starts = batch.query_start_loc[: rows + 1].long()
    context = batch.seq_lens[:rows].long() - (starts[1:] - starts[:-1])
    prompt = torch.from_numpy(batch.is_prefilling_np[:rows].copy())
    return _Step(batch.idx_mapping[:rows].long().clone(), context, prompt)


def _addresses(metadata: Mapping[str, Any], groups: list[Any]) -> dict[str, int]:
    """Return where the tensors that kernels read lie, by group and field."""
    return {
        f"{group.layer_names[0]}.{name}": tensor.data_ptr()
        for group in groups
        for name, tensor in tensors_of(metadata[group.layer_names[0]])
        if not name.endswith("_cpu")
    }


def _of_group(name: str, metadata: Any, rows: int, accepted: list[int | None]) -> Iterator[Difference]:
    """Yield what is wrong with one group's blocks and counts. The metadata of a batch of decodes is in row order."""
    seen: set[int] = set()
    for field, tensor in tensors_of(metadata):
        # Those of prefill_ repeat the prompts', and nested ones are records of another way to keep states.
        if "state_indices" not in field or "." in field or field.startswith("prefill_"):
            continue
        blocks = tensor[: min(rows, _live(metadata, field))]
        for row, several in enumerate((blocks if blocks.dim() > 1 else blocks[:, None]).tolist()):
            for column, block in enumerate(several):
                if block <= 0:
                    yield Difference(name, 0, f"{field}[{row}, {column}]", "is the null block, in a live row")
                elif block in seen:
                    yield Difference(
                        name, 0, f"{field}[{row}, {column}]", f"is block {block}, which another row has too"
                    )
                seen.add(block)
    counts = getattr(metadata, "num_accepted_tokens", None)
    if counts is not None and _live(metadata, "num_accepted_tokens") == rows:
        yield from _count_differences(name, counts[:rows], accepted)


def _live(metadata: Any, field: str) -> int:
    """Return the requests that a field of vLLM's metadata has a row for; rows of padding follow them."""
    if hasattr(metadata, "num_spec_decodes"):
        if field.startswith("non_spec"):
            return int(metadata.num_decodes + metadata.num_prefills)
        return int(metadata.num_spec_decodes)
    return int(metadata.num_prefills if field.endswith("_p") else metadata.num_decodes)


def _count_differences(name: str, counts: torch.Tensor, accepted: list[int | None]) -> Iterator[Difference]:
    for row, (count, wanted) in enumerate(zip(counts.tolist(), accepted, strict=True)):
        if wanted is not None and count != wanted:
            what = f"is {count}, and the request has {wanted} more tokens than before its last step"
            yield Difference(name, 0, f"num_accepted_tokens[{row}]", what)
