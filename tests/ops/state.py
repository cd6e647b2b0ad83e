"""Samples of the ops of recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attn_backends.state_kernels.move_entries import MoveEntries
from attn_backends.state_kernels.rows import EndStateStep
from attn_backends.state_kernels.step import StateStep
from builders import Recurrence, StateSpec
from tests.ops.sample import int32, noise, op

CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3},
}
"""Sums in another order; for 16-bit dtypes this can tip a rounding."""
SLOTS, JOURNAL = 7, 8
BASE, HELD = [9, 50, 3, 4, 1, 5, 4], [0, 0, 0, 8, 0, 4, 1]
ROWS = [(5, 3, 10), (0, 3, 3), (3, 3, 14), (2, 1, 0), (6, 3, 9), (1, 2, 40), (7, 3, 3), (4, 3, 130), (-1, 2, 2)]
"""Slot, query tokens and length: a replay, a new request, a fold, padding, a context beyond the journal and one before
the checkpoint; then rows that count as padding: a slot outside, a length beyond the bound of 128, a negative slot."""
SSD, CONV, KDA = ({"recurrence": each} for each in (Recurrence.SSD, Recurrence.CONV, Recurrence.KDA))
KINDS: list[dict[str, Any]] = [
    {"bias": None},
    {**KDA, "heads": 1, "value_heads": 3, "dims": (24, 8)},
    {"tree": True},
    {"tree": True, **KDA, "width": 2},
    {"may_fold": False, "width": 1},
    {"reserve": 4, "dims": (24, 40)},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16, **KDA},
    {"absorb": True, "times": 26, "dims": (40, 72)},
    {"absorb": True, "times": 26, "resets": True},
    {"resets": True, **KDA},
    {"absorb": True, "times": 6, **KDA, "dims": (40, 16)},
    {**SSD, "bias": None},
    {**SSD, "tree": True, "heads": 1, "skip": None},
    {**SSD, "dtype": torch.bfloat16, "dims": (24, 40), "reserve": 4},
    {**SSD, "absorb": True, "times": 26, "resets": True},
    {**CONV, "width": 3, "value_heads": 3, "bias": None},
    {**CONV, "tree": True, "dtype": torch.bfloat16},
    {**CONV, "absorb": True, "times": 13},
]


def rows(times: int = 1) -> dict[str, torch.Tensor]:
    """Return the rows and the lengths of their slots, with `times` as many query tokens; slots are strided."""
    slots, counts, seq_lens = zip(*ROWS, strict=True)
    starts = torch.tensor([0, *(count * times for count in counts)]).cumsum(0).int()
    lens = [length and length + count * (times - 1) for length, count in zip(seq_lens, counts, strict=True)]
    return {
        "base": int32(*BASE),
        "held": int32(*HELD),
        "query_start_loc": starts,
        "seq_lens": int32(*lens),
        "slots": int32(*slots).repeat_interleave(3)[::3],
    }


def held_only(values: torch.Tensor, before: int = 0) -> torch.Tensor:
    """Put NaN where slots hold nothing, `before` rows and their entries apart."""
    for slot, held in enumerate(HELD):
        values[slot, before + held :] = torch.nan
    return values


def step(
    recurrence: Recurrence = Recurrence.GATED_DELTA,
    heads: int = 2,
    value_heads: int = 4,
    dims: tuple[int, int] = (16, 8),
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    times: int = 1,
    **how: Any,
) -> StateStep:
    batch, rule = rows(times), recurrence.rule
    keys, value_dim = (heads, dims[0]) if rule.has_matrix else (0, 0), dims[1]
    spec = StateSpec(
        num_key_heads=keys[0], key_dim=keys[1], num_value_heads=value_heads, value_dim=value_dim, journal=JOURNAL,
        recurrence=recurrence,
    )  # fmt: skip
    channels, tokens, matrices = spec.conv_channels, int(batch["query_start_loc"][-1]), spec.matrices
    decay = -noise(tokens, *spec.decay_dims, seed=1).abs()
    if how.get("resets"):
        decay[::5] = -torch.inf
    masks = torch.tensor([mask for _, count, _ in ROWS for mask in (1, 3, 5)[:count]])
    key = torch.nn.functional.normalize(noise(SLOTS, JOURNAL, *keys, seed=7), dim=-1)
    state = noise(SLOTS, matrices, keys[1], value_dim, seed=5)
    state[0] = torch.nan
    return StateStep(
        x=noise(tokens, channels, dtype=dtype) / 2,
        decay=decay,
        beta=noise(tokens, matrices, seed=2).sigmoid(),
        weight=noise(channels, width, seed=3, dtype=dtype) / 2,
        bias=how.get("bias", noise(channels, seed=4, dtype=dtype)),
        skip=how.get("skip", noise(value_heads, seed=10)) if rule.skips else None,
        state=state,
        conv=held_only(noise(SLOTS, width - 1 + JOURNAL, channels, seed=6, dtype=dtype), width - 1),
        key=held_only(key),
        update=held_only(noise(SLOTS, JOURNAL, matrices, value_dim, seed=8)),
        decays=held_only(-noise(SLOTS, JOURNAL, *spec.decay_dims, seed=9).abs()),
        **batch,
        tree_masks=masks if how.get("tree") else None,
        max_query_len=3 * times,
        max_seq_len=128,
        absorb=how.get("absorb", False),
        may_fold=how.get("may_fold", True),
        reserve=how.get("reserve", 0),
        recurrence=recurrence.value,
    )


@op("attn_backends::state_step", close=CLOSE, strided="x")
def state_step() -> Iterator[tuple[Any, ...]]:
    yield from (tuple(step(**kind)) for kind in KINDS)


@op("attn_backends::end_state_step")
def end_state_step() -> Iterator[tuple[Any, ...]]:
    batch = rows()
    base, held = batch.pop("base"), batch.pop("held")
    lost = int32(0, 0, 1, 0, 0, 0, 0)
    for absorb, may_fold, reserve in ((False, True, 0), (False, True, 4), (False, False, 0), (True, True, 0)):
        yield tuple(EndStateStep(base, held, lost, **batch, journal=JOURNAL, max_seq_len=128, absorb=absorb,
                                 may_fold=may_fold, reserve=reserve))  # fmt: skip


@op("attn_backends::move_entries")
def move_entries() -> Iterator[tuple[Any, ...]]:
    """After a step of trees: the slots of three rows hold what their lengths say."""
    paths = [[2, -1], [1, 2], [2, 9], [1, 2], [2, -1], [1, 2], [1, 2], [2, -1], [1, 2]]
    names = ("conv", "key", "update", "decays")
    for kind in ({}, KDA, {"dtype": torch.bfloat16, "width": 2}, CONV):
        each = step(**kind)
        batch = rows() | {"base": int32(0, 50, 3, 11, 1, 5, 4), "held": int32(3, 0, 0, 3, 0, 5, 3)}
        parts = {name: noise(*part.shape, dtype=part.dtype) for name, part in each._asdict().items() if name in names}
        for path in (torch.tensor(paths), torch.tensor(paths).T.contiguous().T):
            yield tuple(MoveEntries(**parts, **batch, path=path))
