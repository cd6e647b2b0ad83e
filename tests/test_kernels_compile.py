"""Every kernel compiles for every chip of `builders.chips`, within what the chip has, with tiles for served models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.compiler.errors import CompilationError

from attn_backends.kernels.paged_attention import PagedAttentionArguments
from builders import TritonPagedBuilder, triton_paged
from builders.chips import CHIPS
from builders.devices import FP8_CAPABILITY
from builders.spec import MAX_TREE_TOKENS
from tests.chips import LIMITS, compile_op
from tests.factories import CPU, make_cache, make_spec
from tests.import_graph import module_files
from tests.ops.served import Case, cases
from tests.test_kernels import kernels

KERNELS = {kernel.name for path in module_files().values() for kernel in kernels(path.read_text(encoding="utf-8"))}
SPILLED_ON_HOPPER = {
    ("attn_backends::latent_attention", False): 256,
    ("attn_backends::sparse_attention", True): 104,
    ("attn_backends::state_step", False): 32,
}
"""The most bytes of a thread's registers that a kernel of an op, over 8 bits or not, keeps in memory on an H100."""
SPILLED_BY_PROMPTS = 120
"""The same for attention in tiles of 128 rows, before and after its loops."""
SPILLED_OVER_8_BIT_CACHES = {"sm_80": 8, "sm_90": 72, "sm_100": 104}
"""The same, by chip, for attention of a few tokens per request over 8-bit caches, in tiles of up to 256 of theirs."""

_OF_CACHES = ("paged_attention", "tree_attention", "write_kv", "rope_and_write_kv", "move_accepted_kv")
"""Ops that read or write 8-bit keys and values, without a chip's own conversion where it has none."""

SPILLED_ON_BLACKWELL = 8
"""ptxas spills up to two registers of three products there, also of one that uses 56."""
SPILLED_ELSEWHERE = {"attn_backends::state_step": 128}
"""What ptxas spills of an op on other chips than Hopper: up to 32 registers of a prompt, on sm_120."""
SPILLED_BY_RELEASE = {
    "3.5": {
        "attn_backends::latent_attention": 272,
        "attn_backends::paged_attention": 8,
        "attn_backends::state_step": 32,
    },
    "3.6": {"attn_backends::state_step": 32, "spec_decode::restrict_logits": 8},
    "3.9": {
        "attn_backends::latent_attention": 312,
        "attn_backends::paged_attention": 72,
        "attn_backends::state_step": 96,
    },
}
"""What ptxas spills of an op, on any chip, in releases of Triton other than that of constraints.txt."""


def converts_8_bits(op: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether the op needs a chip's own conversion; over a cache of keys and values bits do."""
    dtypes = {part.dtype for part in arguments if isinstance(part, torch.Tensor)}
    reads_bytes = op == "attn_backends::sparse_attention" and torch.uint8 in dtypes
    weights = torch.float8_e4m3fn in dtypes and not op.partition("::")[2].startswith(_OF_CACHES)
    return weights or reads_bytes or op == "attn_backends::narrow_rows"


def is_prompt(op: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether the op attends to a prompt, whose tiles can have 128 rows on Hopper."""
    return op == "attn_backends::paged_attention" and arguments[8] > MAX_TREE_TOKENS


def reads_8_bit_cache(op: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether the op attends to keys and values in 8 bits."""
    return op == "attn_backends::paged_attention" and arguments[1].dtype == torch.float8_e4m3fn


def only_on_hopper(op: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether no other chip runs this case: it streams rows in 8 bits."""
    return op == "attn_backends::streamed_linear" and arguments[-1]


def most_spilled(chip: Any, op: str, arguments: tuple[Any, ...]) -> int:
    """Return how many bytes of a thread's registers a kernel of an op may keep in memory."""
    other = SPILLED_BY_RELEASE.get(triton.__version__.rpartition(".")[0], {}).get(op, 0)
    on_hopper = SPILLED_ON_HOPPER.get((op, converts_8_bits(op, arguments)))
    here = SPILLED_ON_BLACKWELL if chip.capability >= (10, 0) and on_hopper is None else on_hopper or 0
    of_caches = SPILLED_OVER_8_BIT_CACHES.get(chip.target, 0) if reads_8_bit_cache(op, arguments) else 0
    if chip.target == "sm_90":
        return max(other, here, of_caches, SPILLED_BY_PROMPTS if is_prompt(op, arguments) else 0)
    return max(other, here, of_caches, SPILLED_ELSEWHERE.get(op, 0))


def few_cases() -> list[Case]:
    """Return the first case of each op, the last, and the one between."""
    by_op: dict[str, list[Case]] = {}
    for case in cases():
        by_op.setdefault(case[0], []).append(case)
    return [several[at] for several in by_op.values() for at in sorted({0, len(several) // 2, len(several) - 1})]


FEW = ("sm_80", "sm_90", "sm_120")
"""Chips that differ most."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "every"),
    [
        *(pytest.param(chip, False, id=chip.target) for chip in CHIPS if chip.target in FEW),
        *(pytest.param(chip, True, id=f"{chip.target}-every", marks=pytest.mark.long) for chip in CHIPS),
    ],
)
def test_kernels_compile_within_chip_limits(chip: Any, every: bool) -> None:
    """With every case of an op, or a few."""
    found, over, spilling = set(), [], []
    for op, arguments in cases() if every else few_cases():
        if only_on_hopper(op, arguments) and chip.target != "sm_90":
            continue
        narrow = converts_8_bits(op, arguments)
        if narrow and chip.capability < FP8_CAPABILITY:
            with pytest.raises(CompilationError):
                compile_op(chip, op, arguments)
            continue
        for kernel in compile_op(chip, op, arguments):
            found.add(kernel.name)
            over += [(op, kernel.name, kernel.shared)] if kernel.shared > LIMITS[chip.target].shared_memory else []
            allowed = most_spilled(chip, op, arguments)
            spilling += [(op, kernel.name, kernel.spilled)] if kernel.spilled > allowed else []
    assert (over, spilling) == ([], [])
    elsewhere = {"narrow_rows_kernel"} if chip.capability < FP8_CAPABILITY else set()
    assert KERNELS - found == elsewhere | (set() if chip.target == "sm_90" else {"streamed_tma_kernel"})


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("query_len", [4, 8, 16])
def test_an_sm_holds_the_programs_that_splits_aim_for(query_len: int, head_dim: int, monkeypatch: Any) -> None:
    """On Hopper, in 16 bits. A program more than that would not run until others are done."""
    [hopper] = [chip for chip in CHIPS if chip.target == "sm_90"]
    room, spec = LIMITS["sm_90"], make_spec(num_q_heads=32, num_kv_heads=8, head_dim=head_dim, dtype=torch.bfloat16)
    monkeypatch.setattr(triton_paged, "room_of", lambda device: room)
    builder = TritonPagedBuilder(spec, CPU, max_reqs=8, max_tokens=128, max_seq_len=1 << 17)
    length = {"max_query_len": query_len, "max_seq_len": 1 << 17}
    splits = builder.splits(SimpleNamespace(num_reqs=1, num_tokens=query_len, **length))
    cache = make_cache(spec, 4)
    arguments = PagedAttentionArguments(
        query=torch.empty(query_len, 32, head_dim, dtype=spec.dtype), key_cache=cache.key, value_cache=cache.value,
        block_table=torch.zeros(1, 1 << 15, dtype=torch.int32), seq_lens=torch.zeros(1, dtype=torch.int32),
        query_start_loc=torch.zeros(2, dtype=torch.int32), sinks=None, tree_masks=None, **length, num_splits=splits,
        scale=1.0, sliding_window=None, soft_cap=None, causal=True, batch_invariant=False, key_scale=None,
        value_scale=None,
    )  # fmt: skip
    kernel, _ = compile_op(hopper, "attn_backends::paged_attention", arguments)
    programs = splits * spec.num_kv_heads
    assert kernel.name == "attention_kernel" and 0.5 < programs / (room.num_sms * kernel.resident(room)) <= 1
