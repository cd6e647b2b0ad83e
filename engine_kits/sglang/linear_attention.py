"""SGLang's runner around one of its backends for recurrent layers: its metadata, its graphs, its commit of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from attn_backends import AttentionBackend
from builders import GraphSupport
from engine_kits.hash_recurrence import WINDOW, Slots, after, sequential
from engine_kits.sglang.stand_in import on_an_h200
from engine_kits.state_checks import Play, recurrent_backend
from engine_kits.state_traffic import DRAFTS, DrawnRequest, DrawnStep, StateEngine, Traffic

Extend = Callable[[Any, Any, list[int], Slots], None]
"""Reads and writes what a layer's kernels would for prompts, by the metadata and SGLang's batch."""
_WIDTH, _ROWS = 1 + DRAFTS, 8
_TRAFFIC = {
    "verify": Traffic(alone=True),
    "no_drafts": Traffic(idle=0.4, alone=True),
    "chunks": Traffic(chunks=(1, 3, _WIDTH), alone=True),
    "elsewhere": Traffic(elsewhere=0.7, idle=0.2, alone=True),
}
_PLAYS = {
    "no_drafts-eager": Play(_TRAFFIC["no_drafts"]),
    **{f"{name}-graph": Play(traffic, "graph") for name, traffic in _TRAFFIC.items()},
}


class LinearAttentionRunner(StateEngine):
    """Keeps one slot for each request. A verification writes the states after each token to a row of scratch memory,
    from which SGLang's commit takes the accepted one.

    A round is a verification, decodes of one token, or prompts. With graphs, the first two are replayed, with the
    metadata of their capture.
    """

    rows = 6

    def __init__(self, make: Callable[[Any], Any], extend: Extend, graphs: str) -> None:
        """make: SGLang's backend from a model's runner."""
        super().__init__()
        self.slots = Slots(1 + _ROWS, 0, null=-1)
        self._extend, self._padded = extend, bool(graphs)
        self._states = torch.zeros(1, 1 + _ROWS, _WIDTH, 1, 1, 1, dtype=torch.int64)
        self._windows = torch.zeros(1, 1 + _ROWS, _WIDTH, 1, WINDOW, dtype=torch.int64)
        self.mapping = torch.zeros(1 + _ROWS, dtype=torch.int32)
        self._indices: dict[DrawnRequest, int] = {}
        with on_an_h200():
            self.backend = make(self._model_runner())
            self.backend.init_cuda_graph_state(_ROWS, _ROWS * _WIDTH)
        shapes = [(rows, width) for rows in range(1, _ROWS + 1) for width in (1, _WIDTH)] if graphs else []
        self.captured = {(rows, width): self._capture(rows, width) for rows, width in shapes}

    def admit(self, request: DrawnRequest) -> None:
        free = set(range(1, 1 + _ROWS)) - set(self._indices.values())
        self._indices[request] = index = min(free)
        self.mapping[index] = min(set(range(1, 1 + _ROWS)) - set(self.mapping.tolist()))
        # SGLang's scheduler has the pool clear a new request's slot.
        state, window = sequential(request.text[: request.done])
        self.slots.states[self.mapping[index]] = state
        self.slots.windows[self.mapping[index]] = torch.tensor(window)

    def finish(self, request: DrawnRequest) -> None:
        self.mapping[self._indices.pop(request)] = 0

    def run(self, steps: Sequence[DrawnStep], padding: int) -> None:
        prompts, width = steps[0].request.prefilling, len(steps[0].tokens)
        tokens = [token for step in steps for token in step.tokens]
        if prompts or not self._padded:
            batch = self._batch(steps, 0)
            with on_an_h200():
                self.backend.init_forward_metadata(batch)
            metadata = self.backend.forward_metadata
        else:
            batch, tokens = self._batch(steps, padding), tokens + [0] * (padding * width)
            with on_an_h200():
                self.backend.init_forward_metadata_out_graph(batch)
            metadata, built = self.captured[batch.batch_size, width], self.backend.forward_metadata
            parts = ("query_start_loc", "mamba_cache_indices")
            self.moved |= {part for part in parts if getattr(metadata, part) is not getattr(built, part)}
        if prompts:
            self._extend(metadata, batch, tokens, self.slots)
        elif width == 1:
            self.slots.slide(metadata.mamba_cache_indices, metadata.query_start_loc, tokens)
            self.slots.run(metadata.mamba_cache_indices, metadata.query_start_loc, tokens)
        else:
            self._verify(metadata, tokens)

    def _verify(self, metadata: Any, tokens: list[int]) -> None:
        """Stand in for the kernels, which leave the slots alone: row r of the batch has row r of the scratch memory."""
        starts = metadata.query_start_loc.tolist()
        for row, slot in enumerate(metadata.mamba_cache_indices.tolist()):
            new = tokens[starts[row] : starts[row + 1]]
            if slot >= 0 and new:
                states = list(accumulate(new, after, initial=int(self.slots.states[slot])))[1:]
                seen = [*self.slots.windows[slot].tolist(), *new]
                self._states[0, row, :, 0, 0, 0] = torch.tensor(states)
                self._windows[0, row, :, 0] = torch.tensor(seen[1:]).unfold(0, WINDOW, 1)

    def accept(self, steps: Sequence[DrawnStep], kept: Sequence[int]) -> None:
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

        if steps[0].drafts:
            both = SimpleNamespace(
                linear_attn_backend=self.backend,
                _update_ple_state_after_mtp_verify=lambda *given: None,  # states of another kind of layer
            )
            with on_an_h200():
                last = torch.tensor(kept)
                HybridLinearAttnBackend.update_mamba_state_after_mtp_verify(both, last, None, None, None)

    def held(self, request: DrawnRequest) -> tuple[int | None, list[int]]:
        slot = self.mapping[self._indices[request]]
        return int(self.slots.states[slot]), self.slots.windows[slot].tolist()

    def slots_of(self, request: DrawnRequest) -> set[int]:
        return {int(self.mapping[self._indices[request]])}

    def _capture(self, rows: int, width: int) -> Any:
        batch = self._batch([DrawnStep(DrawnRequest([], 0), [0] * width, width - 1)] * rows, 0)
        with on_an_h200():
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        return self.backend.forward_metadata

    def _batch(self, steps: Sequence[DrawnStep], padding: int) -> Any:
        """Return SGLang's batch of these steps, behind which a graph's rows hold what an older batch left there."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        verify = ForwardMode.TARGET_VERIFY if steps[0].drafts else ForwardMode.DECODE
        mode = ForwardMode.EXTEND if steps[0].request.prefilling else verify
        lengths = [len(step.tokens) for step in steps]
        done = torch.tensor([step.request.done for step in steps] + [0] * padding)
        lens = torch.tensor(lengths)
        return SimpleNamespace(
            batch_size=len(steps) + padding,
            num_padding=padding,
            forward_mode=mode,
            logical_forward_mode=mode,
            req_pool_indices=torch.tensor([self._indices.get(step.request, 0) for step in steps] + [1] * padding),
            seq_lens=done,
            seq_lens_cpu=done,
            input_ids=torch.zeros(sum(lengths)),
            spec_info=SimpleNamespace(draft_token_num=_WIDTH, ragged_verify_layout=None) if steps[0].drafts else None,
            extend_num_tokens=sum(lengths) if mode == ForwardMode.EXTEND else None,
            extend_seq_lens=lens,
            extend_seq_lens_cpu=lengths,
            extend_start_loc=lens.cumsum(0) - lens,
            extend_prefix_lens=done,
            extend_prefix_lens_cpu=done.tolist(),
            tbo_parent_token_range=None,
            multi_item_delimiter_indices=None,
            mamba_track_indices=None,
            mamba_track_mask=None,
            mamba_prefill_track_mask_cpu=None,
            mamba_track_seqlens_cpu=None,
        )

    def _model_runner(self) -> Any:
        """Return the parts of a model's runner that SGLang's backends use, with its pool over the slots."""
        from sglang.srt.layers.attention.linear.utils import LinearAttnBackends, LinearAttnKernelBackend

        caches = SimpleNamespace(
            temporal=self.slots.states.view(1, -1, 1, 1, 1),
            intermediate_ssm=self._states,
            conv=[self.slots.windows.view(1, -1, 1, WINDOW)],
            intermediate_conv_window=[self._windows],
            replayssm_d=None,
            replayssm_rawv=None,
        )
        pool = SimpleNamespace(
            size=_ROWS,
            mamba_pool=SimpleNamespace(mamba_cache=caches, enable_linear_replayssm=False),
            get_mamba_indices=lambda rows: self.mapping[rows],
            translate_mamba_indices=lambda indices: indices,
            get_speculative_mamba2_params_all_layers=lambda: caches,
        )
        triton = LinearAttnKernelBackend.TRITON
        return SimpleNamespace(
            device="cpu",
            is_draft_worker=False,
            req_to_token_pool=pool,
            token_to_kv_pool=None,
            server_args=SimpleNamespace(enable_mis=False),
            linear_attn_backends=LinearAttnBackends(decode=triton, prefill=triton, verify=triton),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=64)),
        )


def linear_backend(name: str, recurrence: str, make: Callable[[Any], Any], extend: Extend) -> type[AttentionBackend]:
    """Return the backend under test over SGLang's, of this name. make, extend: as in LinearAttentionRunner."""
    return recurrent_backend(
        name,
        __name__,
        recurrence,
        _PLAYS,
        lambda graphs: LinearAttentionRunner(make, extend, graphs),
        GraphSupport.UNIFORM_BATCH,
        "SGLang plans a graph's metadata before each replay",
    )
