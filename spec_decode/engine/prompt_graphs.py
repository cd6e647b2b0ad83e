"""The target's forward over prompts, from graphs: a step of few prompt tokens keeps the device busy for less time than
the host needs to launch its kernels one by one.

A graph holds the work of a padded number of tokens. That of one request holds its attention too, where the backends
can be captured over any batch: see `one_prompt`. Otherwise it is in pieces: between them, each layer attends eagerly,
over the metadata of the batch and over its tokens only, so every backend serves prompts as it does without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from attn_backends import StateInputs
from builders import CaptureConstants, RequestTables
from spec_decode.engine.config import EngineConfig
from spec_decode.engine.one_prompt import OnePrompt
from spec_decode.graphs import Capturable, GraphKey, GraphManager, SplitOp
from spec_decode.model_api import AttentionInputs, RecurrentAttention, TargetModel, TargetStates
from spec_decode.paged import KVGroup, StateGroup
from spec_decode.paged.attention import PagedAttention, attend_between, recur_between
from spec_decode.paged.metadata_plan import MetadataPlan

PROMPT, ONE_PROMPT = "prompt", "one prompt"
"""The graph kinds: in pieces, and of one request's prompt."""

_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of a graph. Padding adds half at most from 128 tokens on; fewer take as long as reading the weights does. With
more than the last, the device has work for longer than the host takes to launch it: an 8B Llama's 2,048 tokens take an
H200 about 45 ms in 16 bits, and the launches 20 to 70 ms."""


def prompt_sizes(config: EngineConfig, device: torch.device) -> list[int]:
    """Return the sizes that an engine captures; none on a CPU, which launches no kernels."""
    most = min(config.max_prefill_tokens, config.max_num_seqs * config.max_model_len)
    return sorted({min(size, most) for size in _SIZES}) if device.type == "cuda" else []


class PromptGraphs:
    """A target's graphs by number of tokens."""

    def __init__(
        self,
        model: TargetModel,
        groups: Sequence[KVGroup | StateGroup],
        tables: RequestTables,
        products: Callable[[], AbstractContextManager[None]],
        sizes: Sequence[int],
        plan: MetadataPlan,
    ) -> None:
        """tables: those of prompts. products: the context to run the model in. sizes: numbers of tokens; without any,
        every prompt runs eagerly. plan: of the target's steps."""
        self._model, self._products, self._most_prompts = model, products, tables.max_reqs
        self._groups = groups
        longest = max(sizes, default=0)
        self._token_ids = torch.zeros(longest, dtype=torch.int64, device=tables.device)
        self._positions = torch.zeros_like(self._token_ids)
        self._graphs = GraphManager(tables.device, sizes) if sizes else None
        self._states: dict[GraphKey, TargetStates] = {}
        self._batch = _Batch()
        self._one = OnePrompt(groups, tables, longest) if sizes and OnePrompt.serves(groups, plan) else None

    @torch.no_grad()
    def capture(self, *, progress: bool = False) -> None:
        """Capture every size, and compile the kernels of the logits of any number of prompts: requests would wait."""
        if self._graphs:
            whole = {ONE_PROMPT: self._one_capturable} if self._one else {}
            self._graphs.capture({PROMPT: self._capturable, **whole}, progress=progress)
            hidden = self._states[GraphKey(PROMPT, self._graphs.sizes[-1])].hidden
            with self._products():
                for rows in range(1, self._most_prompts + 1):
                    self._model.logits(hidden[:rows])

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: PagedAttention) -> TargetStates:
        """Return states [T, ...] of token_ids int64 [T] at positions int64 [T]. The next call overwrites them."""
        count = len(token_ids)
        if not self._has_graph(count):
            return self._forward(token_ids, positions, attention)
        self._positions[:count] = positions
        self._batch.attention, self._batch.count = attention, count
        try:
            return self._replay(PROMPT, token_ids, _constants(count))
        finally:
            self._batch.attention = None

    def run_one(self, tables: RequestTables, token_ids: torch.Tensor, seq_len: int) -> TargetStates | None:
        """Return the same of one request, whose last tokens of seq_len these are; None if `run` must serve it."""
        if self._one is None or not self._one.over(tables) or not self._has_graph(len(token_ids)):
            return None
        return self._replay(ONE_PROMPT, token_ids, self._one.load(len(token_ids), seq_len))

    def _has_graph(self, count: int) -> bool:
        return self._graphs is not None and self._graphs.complete and count <= self._graphs.sizes[-1]

    def _replay(self, kind: str, token_ids: torch.Tensor, needed: CaptureConstants) -> TargetStates:
        assert self._graphs is not None
        count = len(token_ids)
        self._token_ids[:count] = token_ids
        key = GraphKey(kind, self._graphs.padded(count))
        self._graphs.replay(key, needed)
        states = self._states[key]
        return TargetStates(states.hidden[:count], states.target_hidden_states[:count])

    def _capturable(self, size: int) -> Capturable:
        def run_in_pieces(split_op: SplitOp) -> None:
            attention = _BatchAttention(self._groups, split_op, self._batch)
            states = self._forward(self._token_ids[:size], self._positions[:size], attention)
            self._states[GraphKey(PROMPT, size)] = states

        return Capturable.pieces(run_in_pieces, _constants(size))

    def _one_capturable(self, size: int) -> Capturable:
        assert self._one is not None
        prepared, positions = self._one.prepare(size), self._one.positions[:size]

        def run() -> None:
            prepared.advance()
            states = self._forward(self._token_ids[:size], positions, prepared.attention)
            self._states[GraphKey(ONE_PROMPT, size)] = states

        return Capturable(run, prepared.constants)

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: RecurrentAttention) -> TargetStates:
        with self._products():
            states: TargetStates = self._model(token_ids, positions, attention)
        return states


@dataclass(slots=True)
class _Batch:
    """What the graphs' calls attend with, over `count` tokens. They hold this and not a PromptGraphs, whose graphs hold
    them: only garbage collection would free the caches of that cycle."""

    attention: PagedAttention | None = None
    count: int = 0


class _BatchAttention:
    """A `RecurrentAttention` that is split out of a graph: the batch's at hand, over its tokens. Outputs of padding are
    what the memory held before; without a batch, as in a capture, all are 0."""

    def __init__(self, groups: Sequence[KVGroup | StateGroup], split_op: SplitOp, batch: _Batch) -> None:
        self._split_op, self._batch = split_op, batch
        self._specs = {layer: group.spec for group in groups if isinstance(group, StateGroup) for layer in group.caches}

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """See `Attention`."""
        batch = self._batch

        def attend(now: AttentionInputs) -> torch.Tensor:
            if batch.attention is None:
                return now.query.new_zeros(*now.query.shape[:2], now.value.shape[2])
            return batch.attention(now.head(batch.count))

        return attend_between(self._split_op, inputs, attend)

    def recur(self, layer: int, inputs: StateInputs) -> torch.Tensor:
        """See `RecurrentAttention`."""
        batch, spec = self._batch, self._specs[layer]

        def recur(now: StateInputs) -> torch.Tensor:
            if batch.attention is None:
                return now.x.new_zeros(len(now.x), spec.num_value_heads, spec.value_dim)
            first = {name: getattr(now, name)[: batch.count] for name in ("x", "decay", "beta")}
            return batch.attention.recur(layer, now._replace(**first))

        return recur_between(self._split_op, inputs, recur)


def _constants(size: int) -> CaptureConstants:
    return CaptureConstants(max_reqs=size, max_query_len=size, max_seq_len=size)
