"""Samples of the ops of builders, drafter and engines."""

from dataclasses import astuple

import torch

import builders.kernels.list_window_slots  # noqa: F401
import spec_decode.drafter.kernels.block_inputs
import spec_decode.drafter.kernels.gather_accepted
import spec_decode.drafter.kernels.shift_tokens
import spec_decode.engine.kernels.prepare_inputs
import spec_decode.engine.kernels.update_requests  # noqa: F401
from attn_backends.engines.sglang.kernels.load_tables import load_tables  # noqa: F401
from builders import BatchBuffers
from tests.builders.flashinfer.host_planner import Case
from tests.factories import make_tables
from tests.ops.sample import int32, noise, op, whole

WILD = int32(2, 0, -(2**31), 2**31 - 1, 1, -1)


def loaded(query_len=1, seq_lens=(6, 8)):
    rows = len(seq_lens)
    tables = make_tables([20] * rows, page_sizes=(4, 8), max_reqs=rows)
    batch = BatchBuffers(tables, max_tokens=rows * query_len)
    batch.load([query_len] * rows, [*seq_lens])
    return batch, tables


@op("builders::advance_decode")
def advance_decode():
    for seq_lens in ([6, 8], [1, 19, 20, 4], [3]):
        batch, tables = loaded(1, seq_lens)
        for length in (None, 0):
            if length is not None:
                batch.seq_lens[0] = length
            yield (
                batch.seq_lens.clone(), batch.positions, batch.slot_mappings, batch.step, tables.overflow,
                tables.block_tables, tables.page_sizes, tables.token_limits,
            )  # fmt: skip


@op("builders::set_extend_state")
def set_extend_state():
    for query_len, context in ((3, (4, 5)), (1, (0, 19)), (5, (17, 3, 0, 30))):
        batch, tables = loaded(query_len, [query_len + 1] * len(context))
        yield (
            batch.seq_lens, batch.positions, batch.slot_mappings, tables.overflow, int32(*context),
            tables.block_tables, tables.page_sizes, tables.token_limits, query_len,
        )  # fmt: skip


@op("builders::set_decode_state")
def set_decode_state():
    for accepted in ((1, 2), (-(2**31), 2**31 - 1), (0, -2)):
        batch, _ = loaded()
        yield batch.seq_lens, batch.positions, batch.slot_mappings, batch.step, int32(6, 0), int32(*accepted), 3


@op("builders::count_prefix")
def count_prefix():
    for rows in (3, 1, 300):
        counts, zero = whole(0, 7, rows), torch.zeros(1, dtype=torch.int64)
        lengths = torch.where(torch.arange(rows) % 3 == 2, 0, counts + whole(0, 99, rows, seed=1))
        yield torch.full((rows,), 7, dtype=torch.int32), lengths.int(), torch.cat([zero, counts.cumsum(0)]).int()


@op("builders::list_window_slots")
def list_window_slots():
    for window, page_size in ((17, 16), (1, 4), (5, 1), (300, 16)):
        for query_lens, seq_lens, padding in (
            ([1] * 4, [1, 16, 17, 129], 2), ([5, 5], [5, 150], 0), ([3, 1, 20], [3, 0, 20], 1),
            ([1, 1, 0, 0], [9, 4, 0, 0], 2), ([1] * 35, range(1, 176, 5), 0),
        ):  # fmt: skip
            starts = torch.tensor([0, *query_lens]).cumsum(0)
            positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)])
            pages, tokens = -(-192 // page_size), int(starts[-1]) + padding
            order = torch.randperm(len(query_lens) * pages, generator=torch.Generator().manual_seed(0))
            table = order.view(-1, pages).int()
            positions = torch.cat([positions.clamp(min=0), torch.full((padding,), 3)])
            width = -(-window // 64) * 64
            yield (
                torch.full((tokens, width), 7, dtype=torch.int32), torch.full((tokens,), 7, dtype=torch.int32),
                positions, int32(*seq_lens), starts.int(), table, window, page_size,
            )  # fmt: skip


@op("builders::flashinfer_replan")
def flashinfer_replan():
    for case in (
        Case([8187]), Case([1]), Case([128, 129, 1024, 1025, 15, 16, 17]), Case([900, 0, 77, 0, 0]), Case([0, 0, 0]),
        Case([9000, *[3] * 31]), Case([5, 300, 1, 2000], page_size=1), Case([5, 300, 1, 2000], page_size=64),
        Case([700, 8000, 30], num_kv_heads=1, grid=2112), Case([200] * 82), Case([8192], grid=512),
        Case([0, 130, 4000, 7] * 100, num_kv_heads=1), Case([8187, 0, 15, 1020], tensor_cores=True),
        Case([500, 1, 0, 90] * 25, tensor_cores=True), Case([2000] * 80, tensor_cores=True),
        Case([2000, *[1] * 32], tensor_cores=True), Case([8187, 0, 15, 1020], tensor_cores=True, window_left=127),
        Case([300, 20], tensor_cores=True, window_left=4096),
        Case([8000, 3, 400], tensor_cores=True, num_kv_heads=1, group=8),
        Case([8187, 0, 15, 1020], tensor_cores=True, query_len=4),
        Case([8187, 0, 15, 1020], tensor_cores=True, query_len=9, group=8, head_dim=256),
        Case([8000, 0, 15, 1020] * 8, page_size=64, tensor_cores=True, num_kv_heads=2, group=8, head_dim=256,
             query_len=9, window_left=600),
    ):  # fmt: skip
        if (layout := case.layout()).split:
            lens, last = int32(*case.seq_lens), torch.full((case.num_reqs,), -77, dtype=torch.int32)
            yield lens, last, case.workspace(), case.row_stride, [int(value) for value in astuple(layout)]


@op("attn_backends::load_tables", strided="slots")
def load_tables_samples():
    for lens, page_size in (([5], 1), ([0, 1, 61], 1), ([0, 7, 8, 9], 4), ([4, 61], 8), ([64], 1)):
        for dtype in (torch.int64, torch.int32):
            for requests in (range(4, 4 - len(lens), -1), [-3, 99, 1, 2][: len(lens)]):
                pages = torch.randperm(320, generator=torch.Generator().manual_seed(0)).view(5, 64)[
                    :, : 64 // page_size
                ]
                slots = (pages[:, :, None] * page_size + torch.arange(page_size)).view(5, -1).int()
                table = torch.full((len(lens), 64 // page_size), -7, dtype=torch.int32)
                context = torch.tensor(lens, dtype=dtype)
                yield slots, torch.tensor([*requests]), context, int32(*[-7] * len(lens)), table, page_size, 3
    yield whole(0, 9999, 2, 2048).int(), torch.tensor([1, 0]), torch.tensor([2000, 1]), int32(0, 0), \
        torch.full((2, 2048), -7, dtype=torch.int32), 1, 3  # fmt: skip


@op("spec_decode::shift_tokens", strided="token_ids")
def shift_tokens():
    for query_len in (4, 1, 2, 5, 8):
        for rows in (6, 1):
            yield torch.arange(rows * query_len).view(rows, -1) + 10, torch.arange(rows) + 900, WILD[:rows]


@op("spec_decode::gather_accepted", strided="hidden")
def gather_accepted():
    for width in (20, 1, 256, 1500):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            last = torch.full((6, width), 7, dtype=dtype)
            yield noise(24, width, dtype=dtype), WILD, last, 4, 1, None, None
    hidden = noise(12, 12)
    for view in (hidden[:, 3:8], hidden[:, ::2], hidden[:10].mT):
        yield view, WILD[: len(view) // 2], torch.zeros(len(view) // 2, view.shape[1]), 2, 1, None, None
    yield noise(2, 2), int32(1), torch.zeros(1, 2, dtype=torch.float16), 2, 1, None, None
    for columns, width in ((4, 96), (1, 5), (7, 1500)):
        rows, accepted = 5 * 2 * columns, int32(0, columns, 1, -9, 99)
        into = torch.full((5 * columns, width), 7.0), torch.full((5 * columns,), 7)
        yield noise(rows, width), accepted, into[0], 2 * columns, columns, whole(0, 999, rows), into[1]


@op("spec_decode::block_inputs", strided="token_ids")
def block_inputs():
    for drafts, width in ((4, 96), (1, 5), (7, 1500)):
        for dtype in (torch.float32, torch.bfloat16):
            accepted = [0, drafts, drafts // 2, -3, 99]
            states = noise(5, 1 + drafts, width, dtype=dtype)
            for row, count in enumerate(accepted):
                states[row, min(max(count, 0), drafts) + 1 :] = torch.nan
            yield (
                whole(0, 99, 5, 1 + drafts), states, torch.arange(5) + 200, int32(*accepted),
                noise(width, seed=1, dtype=dtype), 7, 2 * drafts,
            )  # fmt: skip


@op("spec_decode::prepare_inputs")
def prepare_inputs():
    for steps in (2, 0, 1, 5):
        drafts = whole(-2, 9, 4, steps + 1)[:, :steps].contiguous()
        yield torch.tensor([0, 1, 7, 900]), torch.tensor([0, 5, 6, 7]), drafts


@op("spec_decode::update_requests")
def update_requests():
    for steps in (2, 0, 1, 5):
        for offset in (0, 1):
            for drafting in (True, False):
                drafts = whole(-1, 9, 6, steps + 1, seed=3)
                ones = (torch.full((6,), 7, dtype=t) for t in (torch.int32, torch.int32, torch.int64, torch.int32))
                into = (torch.full((6, 1 + steps), 7), *ones) if drafting else (None,) * 5
                made = (
                    whole(0, steps + 1, 6, seed=1), whole(0, 99, 6, seed=2).where(whole(0, 3, 6) > 0, -1),
                    drafts.clamp(min=0), drafts[:, 1:],
                    torch.tensor([0, 1, 7, 900, 20, 7]), torch.tensor([0, 30, 9, 901, 24, 7]), torch.full((6,), 7),
                    torch.full((6, 2 + steps), 7), *into, offset,
                )  # fmt: skip
                yield *made, None, None
                counts = whole(0, 9, 6, 99).int()
                yield *made, torch.tensor([[1.0, 0, 0], [2, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0], [3, 1, 1]]), counts
