"""vLLM's runner around one builder of recurrent states' metadata. What vLLM decides, its own functions decide here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from builders import AttentionSpec
from engine_kits.hash_recurrence import WINDOW, Slots, sequential
from engine_kits.records import tensors_in
from engine_kits.state_traffic import DRAFTS, DrawnRequest, DrawnStep, StateEngine
from engine_kits.vllm.config import LAYER, MAX_ROWS, MAX_TOKENS, config_of

Kernels = Callable[[Any, list[int], Slots], None]
"""Reads and writes what a layer's kernels would, by the metadata, for the batch's tokens."""
_WIDTH = 1 + DRAFTS
_ROWS = 8
_CPU = torch.device("cpu")
_SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16)


class HybridRunner(StateEngine):
    """Plays vLLM's V2 runner, which keeps for each request one block for a step's first token and one for each draft.

    graphs: "v2" or "v1", whose rule says when the graph of a verification is replayed, or "" for never. Such a graph
    reads the metadata of its capture. All else is V2's: its order of rows, its counts, its model state.
    """

    rows = 6

    def __init__(self, backend: Any, kernels: Kernels, graphs: str, stateless: bool = False) -> None:
        """backend: vLLM's attention backend. stateless: whether its layers have a window only."""
        super().__init__()
        self.slots = Slots(1 + self.rows * _WIDTH, DRAFTS, null=0)
        self._config = config_of(_SPEC, DRAFTS)
        self._kernels, self._graphs, self._stateless = kernels, graphs, stateless
        self.group = _group(backend, self._config)
        self.model_state = _model_state(self._config)
        self._blocks: dict[DrawnRequest, list[int]] = {}
        self._free_blocks = list(range(1, len(self.slots.states)))
        self.indices: dict[DrawnRequest, int] = {}
        self._free_rows = list(range(self.rows))
        self._tables = torch.zeros(MAX_ROWS, _WIDTH, dtype=torch.int32)
        self._allocate()

    def _allocate(self) -> None:
        from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

        self._buffers = InputBuffers(MAX_ROWS, MAX_TOKENS, _CPU)
        sizes = range(1, _ROWS + 1) if self._graphs else ()
        dummies = ((rows, InputBatch.make_dummy(rows, rows * _WIDTH, self._buffers)) for rows in sizes)
        self._captured = {rows: self._build(dummy, full=True, capture=True) for rows, dummy in dummies}

    def admit(self, request: DrawnRequest) -> None:
        self._blocks[request] = blocks = [self._free_blocks.pop(0) for _ in range(_WIDTH)]
        self.indices[request] = self._free_rows.pop()
        self.model_state.add_request(self.indices[request], SimpleNamespace(num_computed_tokens=request.done))
        if request.done:
            state, window = sequential(request.text[: request.done])
            self.slots.states[blocks[0]] = state
            self.slots.windows[blocks[0], :WINDOW] = torch.tensor(window)

    def finish(self, request: DrawnRequest) -> None:
        self._free_blocks += self._blocks.pop(request)
        self._free_rows.append(self.indices.pop(request))

    def warm_up(self, rows: int) -> None:
        """Build for a batch that no request is in, as vLLM does while it starts, and alongside other ranks."""
        from vllm.v1.worker.gpu.input_batch import InputBatch

        self._build(InputBatch.make_dummy(rows, rows * _WIDTH, self._buffers), full=False)

    def run(self, steps: Sequence[DrawnStep], padding: int) -> None:
        by_name = {str(place): step for place, step in enumerate(steps)}
        state, uniform = self._gather(by_name)
        batch = self._batch(state, [by_name[name] for name in state.req_ids], uniform, padding)
        rows = batch.num_reqs_after_padding
        tokens = [token for name in state.req_ids for token in by_name[name].tokens]
        metadata = self._build(batch, full=batch.graph)
        if batch.graph:
            captured, tokens = self._captured[rows], tokens + [0] * (rows * _WIDTH - len(tokens))
            self.moved |= _moved(tensors_in(captured), tensors_in(metadata))
            metadata = captured
        self._kernels(metadata, tokens, self.slots)

    def accept(self, steps: Sequence[DrawnStep], kept: Sequence[int]) -> None:
        for step, drafts in zip(steps, kept, strict=True):
            samples = step.request.done + len(step.tokens) >= step.request.prompt
            # As `postprocess_state` of vLLM does, whose kernel takes most of the time in the interpreter.
            self.model_state.num_accepted_tokens_gpu[self.indices[step.request]] = 1 + drafts if samples else 1

    def held(self, request: DrawnRequest) -> tuple[int | None, list[int]]:
        blocks, first = self._blocks[request], int(self.model_state.num_accepted_tokens_gpu[self.indices[request]]) - 1
        state = None if self._stateless else int(self.slots.states[blocks[first]])
        return state, self.slots.windows[blocks[0], first : first + WINDOW].tolist()

    def slots_of(self, request: DrawnRequest) -> set[int]:
        return set(self._blocks[request])

    def _gather(self, steps: dict[str, DrawnStep]) -> tuple[Any, int | None]:
        """Return vLLM's CPU state of a batch, in its order of rows, and the tokens of each row if a decode is uniform.

        steps: by the names of their requests.
        """
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        requests = {name: step.request for name, step in steps.items()}
        prompts, done = torch.zeros(2, MAX_ROWS, dtype=torch.int32).numpy()
        for request in requests.values():
            index = self.indices[request]
            prompts[index], done[index] = request.prompt, min(request.done, request.prompt)
        runner = SimpleNamespace(
            decode_query_len=_WIDTH,
            use_pp=False,
            adaptive_verification=None,
            pcp_manager=None,
            req_states=SimpleNamespace(
                req_id_to_index={name: self.indices[request] for name, request in requests.items()},
                prefill_len=SimpleNamespace(np=prompts),
                num_computed_prefill_tokens=done,
            ),
        )
        lengths = {name: len(step.tokens) for name, step in steps.items()}
        scheduled = SimpleNamespace(
            num_scheduled_tokens=lengths,
            total_num_scheduled_tokens=sum(lengths.values()),
            scheduled_spec_decode_tokens={
                name: step.tokens[-step.drafts :] for name, step in steps.items() if step.drafts
            },
        )
        found: tuple[Any, int | None] = GPUModelRunner.gather_batch_req_state(runner, scheduled, dummy_run=False)
        return found

    def _batch(self, state: Any, steps: Sequence[DrawnStep], uniform: int | None, padding: int) -> Any:
        """Fill the runner's buffers, and return the input batch over them; its graph is whether one is replayed."""
        live, lengths = len(steps), [len(step.tokens) for step in steps]
        graph = self._replays(lengths, uniform)
        rows = live + padding if graph else live
        starts, lens = self._buffers.query_start_loc, self._buffers.seq_lens
        starts.fill_(sum(lengths))
        starts[: live + 1] = torch.tensor([0, *lengths]).cumsum(0)
        lens.zero_()
        lens[:live] = torch.tensor([step.request.done + len(step.tokens) for step in steps])
        self._tables.zero_()
        self._tables[:live] = torch.tensor([self._blocks[step.request] for step in steps])
        # The host runs ahead: it takes drafts whose verdict it does not know for accepted.
        bound = lens[:rows].clone()
        bound[:live] += torch.tensor([step.request.rejected for step in steps])
        return SimpleNamespace(
            num_reqs=live,
            num_reqs_after_padding=rows,
            num_tokens=sum(lengths),
            num_tokens_after_padding=rows * _WIDTH if graph else sum(lengths),
            idx_mapping=torch.from_numpy(state.idx_mapping_np),
            num_scheduled_tokens=state.num_scheduled_tokens,
            num_draft_tokens_per_req=state.num_draft_tokens_np,
            max_query_len=None,
            query_start_loc=starts[: rows + 1],
            query_start_loc_np=starts[: rows + 1].numpy().copy(),
            seq_lens=lens[:rows],
            seq_lens_cpu_upper_bound=bound,
            dcp_local_seq_lens=None,
            positions=self._buffers.positions,
            prompt_lens=None,
            prefill_len_np=state.prefill_len_np,
            is_prefilling_np=state.is_prefilling_np,
            prefill_runs_as_decode_np=state.prefill_runs_as_decode_np,
            graph=graph,
        )

    def _replays(self, lengths: Sequence[int], uniform: int | None) -> bool:
        """Whether the runner replays a verification's graph for rows of these lengths."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        if self._graphs == "v1":
            by_shape: bool = GPUModelRunner._is_uniform_decode(max(lengths), _WIDTH, sum(lengths), len(lengths))
            return by_shape
        return self._graphs == "v2" and uniform == _WIDTH

    def _build(self, batch: Any, *, full: bool, capture: bool = False) -> Any:
        from vllm.config.compilation import CUDAGraphMode

        rows = batch.num_reqs_after_padding
        metadata = self.model_state.prepare_attn(
            batch,
            CUDAGraphMode.FULL if full else CUDAGraphMode.NONE,
            (self._tables[:rows],),
            torch.zeros(1, batch.num_tokens_after_padding, dtype=torch.int64),
            [[self.group]],
            SimpleNamespace(kv_cache_groups=[None]),
            for_capture=capture,
        )
        return metadata[LAYER]


def _group(backend: Any, config: Any) -> Any:
    """Return vLLM's group of one layer, with its builder."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import MambaSpec
    from vllm.v1.worker.utils import AttentionGroup

    shapes = {"shapes": ((WINDOW + DRAFTS, 1), (1,)), "dtypes": (torch.int64, torch.int64)}
    group = AttentionGroup(
        backend, [LAYER], MambaSpec(block_size=2048, num_speculative_blocks=DRAFTS, **shapes), kv_cache_group_id=0
    )
    with set_current_vllm_config(config):
        group.create_metadata_builders(config, _CPU)
    return group


def _model_state(config: Any) -> Any:
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    return MambaHybridModelState(config, SimpleNamespace(), None, _CPU)


def _moved(held: dict[str, torch.Tensor], built: dict[str, torch.Tensor]) -> set[str]:
    """Return the tensors on the device that a graph holds, and that were not built there."""
    device = {name: tensor.data_ptr() for name, tensor in held.items() if not name.endswith("_cpu")}
    return {name for name, address in device.items() if name not in built or built[name].data_ptr() != address}
