"""The state fixture: requests over the slots of three layers, whose outputs and states an oracle knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_backends import StateCache, StateInputs
from builders import AttentionBatch, BatchBuffers, RequestTables, StateBuilder, StateMetadata, StateSpec, advance_state
from spec_decode.graphs import runtime_for
from spec_decode.testing.host_reads import expect_no_wait
from spec_decode.testing.metadata_fields import expect_same_fields
from spec_decode.testing.outcome import CheckFailure, Measurements, expect
from spec_decode.testing.poison import bits
from spec_decode.testing.state_oracle import LayerWeights, Text, Tokens
from spec_decode.testing.state_subject import QUERY, StateSubject

_LAYERS = 3
"""With two, a fault in the last layer can hide behind one in the first."""
_MAX_SEQ_LEN = 1 << 12
_FLOOR = 64 * torch.finfo(torch.float32).eps
"""Error that any order of sums can have, relative to the largest element."""
_ROW_TOKENS = 128
"""Query tokens of a row, at most."""


class _Step(NamedTuple):
    """A step of all layers, its inputs and outputs at fixed addresses."""

    run: Callable[[], None]
    inputs: list[Tensor]
    out: Tensor
    metadata: StateMetadata


class StateFixture:
    """Slots whose memory is NaN and whose lengths are garbage until a request begins there.

    Steps of equally many tokens in each row run from a captured graph; prompts and other steps run without one. What a
    step gives is compared with the oracle, and padding rows must give 0. texts: the verified tokens of each slot.
    """

    def __init__(
        self,
        subject: StateSubject,
        spec: StateSpec,
        *,
        rows: int = 4,
        slots: int = 6,
        layers: int = _LAYERS,
        bias: bool = True,
    ) -> None:
        """bias: whether convolutions have one. Raises Unsupported if the backend rejects the spec."""
        subject.require_supported(spec)
        self.backend, self.spec, self.rows, self.device = subject.backend, spec, rows, subject.device
        self.generator = torch.Generator().manual_seed(0)
        self.buffers, self.builder = self._build_from(slots)
        self.caches = self.backend.allocate_state(spec, layers, slots, self.device)
        self.lengths = self.caches[0].lengths
        self.weights = [self._draw_weights(bias) for _ in range(layers)]
        self.device_weights = [[None if part is None else part.to(self.device) for part in own] for own in self.weights]
        self.texts: dict[int, Text] = {}
        self.measured: Measurements = {"error_over_budget": 0.0}
        self.last: StateMetadata | None = None
        """The metadata of the last step."""
        self._graphs: dict[Any, _Step] = {}
        self._errors: dict[str, float] = {}
        self.recycle(*range(slots))

    def _build_from(self, slots: int) -> tuple[BatchBuffers, StateBuilder]:
        """Return the shared state of batches, and a builder for them."""
        rows, tokens, device = self.rows, self.rows * _ROW_TOKENS, self.device
        tables = RequestTables(
            page_sizes=[_MAX_SEQ_LEN], num_pages=[slots], max_reqs=rows, max_seq_len=_MAX_SEQ_LEN, device=device
        )
        bounds = {"max_reqs": rows, "max_tokens": tokens, "max_seq_len": _MAX_SEQ_LEN}
        return BatchBuffers(tables, max_tokens=tokens), self.backend.builder(self.spec, device, **bounds)

    def recycle(self, *slots: int) -> None:
        """End the requests of these slots, and leave garbage there."""
        for slot in slots:
            self.texts.pop(slot, None)
            for cache in self.caches:
                for part in _parts(cache):
                    part[slot] = torch.nan
            self.lengths.base[slot], self.lengths.held[slot] = 5, min(3, self.spec.journal)

    def _draw_weights(self, has_bias: bool) -> LayerWeights:
        draw, spec = self.generator, self.spec
        shapes = (spec.conv_channels, spec.conv_width), (spec.conv_channels,)
        weight, bias = (0.5 * torch.randn(shape, generator=draw).to(spec.dtype) for shape in shapes)
        skips = spec.recurrence.rule.skips
        return LayerWeights(
            weight, bias if has_bias else None, torch.randn(spec.num_value_heads, generator=draw) if skips else None
        )

    def tokens(self, count: int) -> Tokens:
        """Draw inputs, with decays from slow to fast."""
        draw, spec, layers = self.generator, self.spec, len(self.weights)
        rates = torch.logspace(-3, 0, spec.matrices).view(-1, *(1,) * (len(spec.decay_dims) - 1))
        return Tokens(
            torch.randn(layers, count, spec.conv_channels, generator=draw).to(spec.dtype),
            -rates * torch.rand(layers, count, *spec.decay_dims, generator=draw),
            torch.rand(layers, count, spec.matrices, generator=draw),
        )

    def admit(self, slot: int, *chunks: int | Tokens) -> None:
        """Begin a request whose prompt is computed in these chunks."""
        self.texts[slot] = Text.empty(self.spec, self.weights)
        for chunk in chunks:
            new = {slot: self.tokens(chunk) if isinstance(chunk, int) else chunk}
            self.texts[slot] = self.run(new, "a prompt", absorb=True)[slot][-1]

    def begin(self, prompts: Mapping[int, int]) -> None:
        """Begin requests whose prompts, of these tokens, are computed in one step."""
        self.texts |= {slot: Text.empty(self.spec, self.weights) for slot in prompts}
        after = self.run({slot: self.tokens(count) for slot, count in prompts.items()}, "prompts", absorb=True)
        self.texts |= {slot: texts[-1] for slot, texts in after.items()}

    def verify(self, accepted: Mapping[int, int], contract: str, *, count: int = QUERY, **how: Any) -> None:
        """Run `count` new tokens of these slots, in this order of rows; keep the first and `accepted` more of each."""
        after = self.run({slot: self.tokens(count) for slot in accepted}, contract, **how)
        self.texts |= {slot: after[slot][kept] for slot, kept in accepted.items()}

    def run(
        self,
        new: Mapping[int, Tokens],
        contract: str,
        *,
        texts: Mapping[int, Text] | None = None,
        parents: Sequence[int] | None = None,
        lost: Collection[int] = (),
        captured: bool = True,
        advances: bool = False,
        **how: Any,
    ) -> dict[int, list[Text]]:
        """Run the new tokens of each slot, in this order of rows. Return each request after each of them.

        texts: the requests so far, if not the verified ones. parents: of each token, if they form a tree; -1 is the
        context. lost: slots whose outputs must be 0. captured: whether equal counts run from a graph. advances:
        whether the step begins one token earlier, with an advance, whose metadata is then compared with a build for
        the same lengths elsewhere. how: see `StateBuilder.build`. Raises CheckFailure for outputs beyond the budget.
        """
        texts = self.texts if texts is None else texts
        counts = [tokens.num for tokens in new.values()]
        padded = len({*counts}) == 1
        step = None
        if captured and padded and not how.get("absorb"):
            step = self._graph(counts[0], parents is not None, advances, how)
        rows = self.rows if padded else len(new)
        lengths = [texts[slot].length + tokens.num for slot, tokens in new.items()]
        _load(self.buffers, new, [length - advances for length in lengths], parents, rows)
        step = step or self._step(_view(self.buffers, counts, rows), advances, how)
        for buffer, parts in zip(step.inputs, zip(*new.values(), strict=True), strict=True):
            buffer.fill_(torch.nan)
            buffer[:, : sum(counts)] = torch.cat(parts, 1).to(self.device)
        step.out.fill_(torch.nan)
        step.run()
        self.last = step.metadata
        if advances:
            buffers, builder = self._build_from(len(self.lengths.base))
            _load(buffers, new, lengths, parents, rows)
            expect_same_fields(step.metadata, builder.build(_view(buffers, counts, rows), **how), contract)
        padding = step.out[:, sum(counts) :]
        expect(
            bool(padding.eq(0).all()),
            contract=f"{contract}: tokens of padding rows",
            expected="outputs of 0",
            got=f"{int(padding.ne(0).sum())} other elements",
        )
        after, wanted = _follow(new, texts, parents, lost)
        tokens = [f"query token {token} of slot {slot}" for slot in new for token in range(new[slot].num)]
        axes = ("layer", tokens, "head", "column")
        self.expect_close("outputs", step.out[:, : sum(counts)], wanted, axes, contract)
        return after

    def accept_paths(self, paths: Mapping[int, Sequence[int]], after: Mapping[int, Sequence[Text]]) -> None:
        """Keep a path of the tree that ran last, in each row: query tokens behind the root."""
        path = torch.full((self.rows, max(map(len, paths.values()))), -1, device=self.device)
        for row, (slot, kept) in enumerate(paths.items()):
            path[row, : len(kept)] = torch.tensor(kept)
            self.texts[slot] = after[slot][kept[-1]]
        assert self.last is not None
        self.backend.move_accepted(self.caches, self.last, path, spec=self.spec)

    def _graph(self, count: int, tree: bool, advances: bool, how: Mapping[str, Any]) -> _Step:
        """Return the captured step of this shape, captured over padding rows only."""
        key = (count, tree, advances, *sorted(how.items()))
        if key not in self._graphs:
            self.buffers.clear()
            self.buffers.set_uniform(count)
            view = _view(self.buffers, [count], self.rows)
            step = self._step(self.buffers.tree_view(view) if tree else view, advances, how)
            # At their first call kernels are compiled, which no graph can hold.
            step.run()
            with expect_no_wait("a step can be captured: it only enqueues device work", "a capture"):
                self._graphs[key] = step._replace(run=runtime_for(self.device).capture(step.run).replay)
        return self._graphs[key]

    def _step(self, view: AttentionBatch, advances: bool, how: Mapping[str, Any]) -> _Step:
        spec, tokens = self.spec, view.num_tokens
        sizes = (
            (spec.conv_channels,),
            spec.decay_dims,
            (spec.matrices,),
            (spec.num_value_heads, spec.value_dim),
        )
        dtypes = (spec.dtype, torch.float32, torch.float32, spec.dtype)
        *inputs, out = (
            torch.zeros(len(self.caches), tokens, *size, dtype=dtype, device=self.device)
            for size, dtype in zip(sizes, dtypes, strict=True)
        )
        metadata = self.builder.build(view, **how)

        def run() -> None:
            if advances:
                advance_state(self.buffers, view.num_reqs)
                self.builder.advance(metadata)
            for layer, (cache, weights) in enumerate(zip(self.caches, self.device_weights, strict=True)):
                given = StateInputs(*(part[layer] for part in inputs), *weights)
                out[layer].copy_(self.backend.forward(given, cache, metadata, spec=spec))
            self.backend.end_step(self.lengths, metadata, spec=spec)

        return _Step(run, inputs, out, metadata)

    def expect_states(self, contract: str) -> None:
        """Raise CheckFailure if a state or window is not that of the slot's verified tokens, or a state was lost."""
        lost = [slot for slot in self.texts if self.lengths.lost[slot]]
        expect(not lost, contract=f"{contract}: lengths fit", expected="no lost slot", got=f"slots {lost} lost")
        slots = torch.tensor([*self.texts], device=self.device)
        seq_lens = torch.tensor([text.length for text in self.texts.values()], device=self.device)
        for layer, cache in enumerate(self.caches):
            found = self.backend.read(cache, slots, seq_lens)
            pairs = [text.layers[layer] for text in self.texts.values()]
            states = [torch.stack([pair[kind].state for pair in pairs]) for kind in (0, 1)]
            windows = [torch.stack([pair[kind].windows() for pair in pairs]) for kind in (0, 1)]
            rows = [f"slot {slot} after {text.length} tokens" for slot, text in self.texts.items()]
            self.expect_close("states", found[0], states, (rows, "head", "key", "column"), f"{contract}, layer {layer}")
            self.expect_close("windows", found[1], windows, (rows, "input", "channel"), f"{contract}, layer {layer}")

    def expect_close(
        self,
        what: str,
        found: Tensor,
        wanted: Sequence[Tensor],
        axes: Sequence[str | Sequence[str]],
        contract: str,
    ) -> None:
        """Raise CheckFailure if `found` differs from the reference by more than twice the low-precision one's largest
        error so far, relative to the largest element; it names the worst element. wanted: the reference, and the
        low-precision one. axes: the name of each dim, or those of its elements."""
        reference, low = wanted
        if not reference.numel():
            return
        size = reference.abs().max().clamp_min(1e-12)
        got = found.double().cpu()
        errors, of_low = (((each - reference).abs() / size).nan_to_num(nan=torch.inf) for each in (got, low))
        error = float(errors.max())
        self._errors[what] = max(self._errors.get(what, 0.0), float(of_low.max()))
        budget = 2 * self._errors[what] + _FLOOR
        self.measured["error_over_budget"] = max(self.measured["error_over_budget"], error / budget)
        if error <= budget:
            return
        at = tuple((errors == error).nonzero()[0].tolist())
        place = [f"{axis} {i}" if isinstance(axis, str) else axis[i] for axis, i in zip(axes, at, strict=True)]
        raise CheckFailure(
            contract=f"{contract}: {what}",
            expected=f"those of a sequential run within {budget:.2e}; {reference[at]:.6g} at {', '.join(place)}",
            got=f"{got[at]:.6g}, a relative error of {error:.2e}, on [{self.spec.describe()}]",
        )

    def content(self, slot: int) -> list[Tensor]:
        """Return a copy of a slot's bits in every layer, with its lengths."""
        parts = [part for cache in self.caches for part in _parts(cache)]
        return [bits(part[slot]).clone() for part in (*parts, self.lengths.base, self.lengths.held)]


def _parts(cache: StateCache) -> tuple[Tensor, ...]:
    return cache.state, cache.conv, cache.key, cache.update, cache.decay


def _view(buffers: BatchBuffers, counts: Sequence[int], rows: int) -> AttentionBatch:
    uniform = len({*counts}) == 1
    tokens = rows * counts[0] if uniform else sum(counts)
    return buffers.view(0, num_reqs=rows, num_tokens=tokens, max_query_len=max(counts), uniform=uniform)


def _load(
    buffers: BatchBuffers,
    new: Mapping[int, Tokens],
    lengths: Sequence[int],
    parents: Sequence[int] | None,
    rows: int,
) -> None:
    buffers.tables.load([[[slot] for slot in new]], [_MAX_SEQ_LEN] * len(new))
    buffers.load([tokens.num for tokens in new.values()], lengths, pad_reqs=rows)
    masks: list[int] = []
    for token, parent in enumerate(parents or ()):
        masks.append(1 << token | (masks[parent] if parent >= 0 else 0))
    buffers.tree_masks[: len(new) * len(masks)] = torch.tensor(masks * len(new), device=buffers.tree_masks.device)


def _follow(
    new: Mapping[int, Tokens], texts: Mapping[int, Text], parents: Sequence[int] | None, lost: Collection[int]
) -> tuple[dict[int, list[Text]], list[Tensor]]:
    """Return each request after each token, and the outputs of all of them in both precisions."""
    after: dict[int, list[Text]] = {slot: [] for slot in new}
    outputs: list[Sequence[Tensor]] = []
    for slot, tokens in new.items():
        for at in range(tokens.num):
            parent = at - 1 if parents is None else parents[at]
            text, out = (texts[slot] if parent < 0 else after[slot][parent]).after(tokens, at)
            after[slot].append(text)
            outputs.append([part * 0 for part in out] if slot in lost else out)
    return after, [torch.stack(each, 1) for each in zip(*outputs, strict=True)]
