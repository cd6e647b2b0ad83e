"""Validation of draft metadata in a served vLLM: ATTN_BACKENDS_VALIDATE=1, for drafts that run as one full graph.

If the metadata that a graph replays goes stale, the only sign is a lower acceptance rate. After some of the rounds, the
tensors that the draft's graph read in its last step are compared with those that a second set of vLLM's own builders
builds for the same batch, and the captured buffers with those that vLLM fills now. The first difference is logged with
its group, step and field, and ends the comparison.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.ops import flashmla
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator
from vllm.v1.worker.utils import AttentionGroup

from attn_backends.engines.vllm.device_plan import DevicePlan
from attn_backends.engines.vllm.version import SUPPORTED, UnsupportedVllm

SHARE = 0.01
"""Maximum share of the time: after a comparison, the next one waits for 1 / SHARE times as long as it took. A
comparison first waits for queued device work, which counts too: if the host limits an engine, that time is lost."""
Arguments: TypeAlias = Callable[[], Mapping[str, Any]]
"""Returns a method's arguments by name; lazy because most rounds need none, and binding takes the most time here."""
_log = init_logger("vllm.attn_backends")


class Difference(NamedTuple):
    """A place where a graph reads something other than the batch."""

    group: str
    step: int
    field: str
    what: str


class Round(NamedTuple):
    """A round that a full graph has run.

    key         of the graph: its tokens and draft steps
    num_reqs    without padding
    padded      num_reqs with padding
    query_len   query tokens per request
    step        the last one, whose batch is in the buffers
    """

    key: tuple[int, int]
    num_reqs: int
    padded: int
    query_len: int
    step: int
    seq_lens_cpu_upper_bound: torch.Tensor


class DraftValidator:
    """Validates one vLLM speculator.

    rounds, seconds: comparisons so far and their time. found: the first difference. paused: suspends comparing.
    """

    def __init__(self, speculator: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.speculator, self.rounds, self.seconds, self.paused = speculator, 0, 0.0, False
        self.found: Difference | None = None
        self._clock, self._next, self.is_capturing = clock, -float("inf"), False
        self._captured: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._addresses: dict[str, int] = {}
        self._groups: list[list[AttentionGroup]] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Collect the metadata that vLLM passes to its graphs while it captures; each graph uses the last of its
        shape."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False
        self._addresses = self._buffers()
        if self._captured:
            # At start-up, because they need workspaces: later, the KV cache may leave no memory for these.
            self._groups = _second_builders(self.speculator)
        else:
            kind = type(self.speculator).__name__
            _log.warning("No draft metadata is compared: %s captured no graph that updates its metadata.", kind)

    def keep(self, key: tuple[int, int], attn_metadata: Mapping[str, Any] | None) -> None:
        """Record the metadata of a forward that is captured, or that warms up for a capture."""
        if attn_metadata is not None:
            self._captured[key] = attn_metadata

    @property
    def is_due(self) -> bool:
        """Whether it is time to compare."""
        return not (self.paused or self.found or self._clock() < self._next)

    def after(self, done: Round) -> None:
        """Compare if the round ran on a captured graph. Logs the first difference."""
        if done.key not in self._captured:
            return
        # Detecting a dummy reads from the device, which can still be busy: the wait counts.
        begin = self._clock()
        is_dummy = self._is_dummy(done)
        if not is_dummy:
            self.found = next(self._differences(done), None)
            self.rounds += 1
        now = self._clock()
        self.seconds += now - begin
        self._next = now + (now - begin) / SHARE
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
                for field, what in _first_difference(name, found, wanted):
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


def compare(captured: Any, fresh: Any, done: Round) -> Iterator[tuple[str, str]]:
    """Yield field and difference for each tensor whose request rows differ from the fresh one.

    Schedules, which divide the work of padding too, are compared only in a batch without padding.
    """
    expected = dict(_tensors(fresh))
    for name, found in _tensors(captured):
        if name.endswith("schedule_metadata") and done.num_reqs < done.padded:
            # DeepGEMM's: it also divides the work of padding, whose lengths advance in a graph and are 0 in a build.
            continue
        wanted = expected.get(name)
        if wanted is None or wanted.shape != found.shape:
            yield name, f"has the shape {list(found.shape)}, freshly built {wanted is not None and list(wanted.shape)}"
            continue
        live = _live_rows(len(found), done) if found.dim() else None
        yield from _first_difference(name, found[:live] if live else found, wanted[:live] if live else wanted)


def _first_difference(name: str, found: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[str, str]]:
    if not torch.equal(found, wanted):
        where = tuple((found != wanted).nonzero()[0].tolist())
        yield f"{name}{list(where)}", f"is {found[where].item()}, freshly built {wanted[where].item()}"


def _live_rows(length: int, done: Round) -> int:
    """Return how many of a tensor's first elements belong to requests; a graph's padding has no meaning."""
    rows = {done.padded + 1: done.num_reqs + 1, done.padded * done.query_len: done.num_reqs * done.query_len}
    return {**rows, done.padded: done.num_reqs}.get(length, length)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested records by path, except scratch space (floats), vLLM's batch, which no kernel reads,
    and FlashMLA's schedule, which no build makes."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            yield name.removeprefix("."), value
    elif isinstance(value, DevicePlan):
        yield from ((f"{name}.{array}".removeprefix("."), content) for array, content in value.arrays().items())
    elif dataclasses.is_dataclass(value) and not isinstance(
        value, (type, CommonAttentionMetadata, flashmla.FlashMLASchedMeta)
    ):
        for field, inner in vars(value).items() if hasattr(value, "__dict__") else _slots(value):
            yield from _tensors(inner, f"{name}.{field}")


def _slots(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]


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


def validator_of(speculator: Any) -> DraftValidator:
    """Return the speculator's validator, made on first use."""
    if "attn_backends_validator" not in vars(speculator):
        speculator.attn_backends_validator = DraftValidator(speculator)
    found: DraftValidator = speculator.attn_backends_validator
    return found


def install() -> None:
    """Wrap vLLM's speculators, once. Raises UnsupportedVllm if one is not vLLM's own."""
    wrong = [
        f"{cls.__name__}.{name}"
        for cls, hooks in _HOOKS.items()
        for name, (_, arguments) in hooks.items()
        if not _takes(getattr(cls, name, None), arguments.split())
    ]
    if wrong:
        raise UnsupportedVllm(
            f"ATTN_BACKENDS_VALIDATE=1 supports the speculators of vLLM {SUPPORTED}, this one differs in: "
            f"{', '.join(wrong)}. Install a released vLLM {SUPPORTED}, or unset the variable."
        )
    for cls, hooks in _HOOKS.items():
        for name, (around, _) in hooks.items():
            _wrap(cls, name, around)
    _wrap(DraftModelSpeculator, "set_attn", _warn_not_compared)


def _takes(method: Any, arguments: list[str]) -> bool:
    return callable(method) and set(arguments) <= set(inspect.signature(method).parameters)


def _wrap(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Make the method call `around` with itself, the speculator and a getter of its arguments by name."""
    method = getattr(cls, name)
    if getattr(method, "_around", None) is around:
        return
    signature = inspect.signature(method)

    @wraps(method)
    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        def get_arguments() -> Mapping[str, Any]:
            bound = signature.bind(self, *args, **named)
            bound.apply_defaults()
            return bound.arguments

        return around(lambda: method(self, *args, **named), self, get_arguments)

    wrapped._around = around  # type: ignore[attr-defined]
    setattr(cls, name, wrapped)


def _capture(method: Callable[[], Any], speculator: Any, get_arguments: Arguments) -> Any:
    with validator_of(speculator).capturing():
        return method()


def _keep_steps(method: Callable[[], Any], speculator: Any, get_arguments: Arguments) -> Any:
    if (validator := validator_of(speculator)).is_capturing:
        arguments = get_arguments()
        validator.keep((arguments["num_tokens_padded"], arguments["num_speculative_steps"]), arguments["attn_metadata"])
    return method()


def _after_steps(method: Callable[[], Any], speculator: Any, get_arguments: Arguments) -> Any:
    result = method()
    if (validator := validator_of(speculator)).is_due:
        arguments = get_arguments()
        if (desc := arguments["batch_desc"]).cg_mode == CUDAGraphMode.FULL:
            # A graph without a fixed number of steps runs them all.
            steps = getattr(desc, "num_speculative_tokens", speculator.num_speculative_steps)
            padded = desc.num_reqs or desc.num_tokens
            bound = arguments["seq_lens_cpu_upper_bound"]
            validator.after(Round((desc.num_tokens, steps), arguments["num_reqs"], padded, 1, steps - 1, bound))
    return result


def _keep_block(method: Callable[[], Any], speculator: Any, get_arguments: Arguments) -> Any:
    if (validator := validator_of(speculator)).is_capturing:
        arguments = get_arguments()
        validator.keep((arguments["num_reqs"], 0), arguments["attn_metadata"])
    return method()


def _note_block(method: Callable[[], Any], speculator: Any, get_arguments: Arguments) -> Any:
    if validator_of(speculator).is_due:
        arguments = get_arguments()
        speculator.attn_backends_replayed = None if arguments["dummy_run"] else arguments["num_graph_reqs"]
    return method()


def _after_block(method: Callable[[], Any], speculator: Any, get_arguments: Arguments) -> Any:
    speculator.attn_backends_replayed = None
    result, padded = method(), speculator.attn_backends_replayed
    if padded is not None:
        batch, query_len = get_arguments()["input_batch"], speculator.num_query_per_req
        done = Round((padded, 0), batch.num_reqs, padded, query_len, 0, batch.seq_lens_cpu_upper_bound)
        validator_of(speculator).after(done)
    return result


def _warn_not_compared(method: Callable[[], Any], speculator: Any, get_arguments: Arguments) -> Any:
    result = method()
    supported: Any = tuple(_HOOKS)
    if not isinstance(speculator, supported):
        _log.warning("Draft metadata of %s is not compared: it drafts in its own way.", type(speculator).__name__)
    elif not speculator.supports_decode_metadata_update:
        _log.warning("No draft metadata is compared: vLLM rebuilds it for every step.")
    elif speculator.vllm_config.compilation_config.cudagraph_mode is CUDAGraphMode.NONE:  # `capture` is not called
        _log.warning("No draft metadata is compared: CUDA graphs are off.")
    return result


_HOOKS: dict[type[Any], dict[str, tuple[Callable[..., Any], str]]] = {
    TargetDependentARSpeculator: {
        "capture": (_capture, ""),
        "_generate_fused_drafts": (_keep_steps, "num_tokens_padded attn_metadata num_speculative_steps"),
        "_fused_multi_step_decode": (
            _after_steps,
            "num_reqs batch_desc seq_lens_cpu_upper_bound num_speculative_steps",
        ),
    },
    DFlashSpeculator: {
        "capture": (_capture, ""),
        "_prepare_graph_forward": (_keep_block, "num_reqs attn_metadata"),
        "_prepare_graph_replay": (_note_block, "input_batch num_graph_reqs dummy_run"),
        "propose": (_after_block, "input_batch"),
    },
}
"""The wrapper of each method, and the arguments that it reads."""
