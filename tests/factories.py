"""Small test fixtures: specs, tables, shared state with arbitrary content, and model pairs that sometimes agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from attn_backends import AttentionBackend, KVCache, register
from attn_backends.torch_reference import TorchReference
from builders import AttentionSpec, BatchBuffers, RequestTables
from spec_decode.drafter import DrafterConfig
from spec_decode.engine import EngineConfig, Request
from spec_decode.models import EagleDraft, LatentConfig, LlamaTarget, ModelConfig
from spec_decode.paged import GraphMode
from spec_decode.sampling import SamplingParams
from spec_decode.testing.layouts import scales_of

CPU = torch.device("cpu")
indexes_fp8 = pytest.mark.xfail(
    torch.__version__.startswith("2.9."), reason="torch 2.9 indexes no fp8 on a CPU", strict=True
)


def register_as(name: object, make: Callable[[], Any], *, replace: bool = False) -> type[AttentionBackend]:
    """Register what `make` returns, normally a backend, under the given name."""
    kind = type("Made", (TorchReference,), {"name": name, "__new__": lambda cls: make()})
    return register(replace=replace)(kind)


def install_plug_in(site: Path, package: str, name: str, source: str) -> None:
    """Write a package into a folder that declares the backend `name`, the class Backend of its module."""
    module = package.replace("-", "_")
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[attn_backends]\n{name} = {module}:Backend\n")


def make_spec(**changes: Any) -> AttentionSpec:
    defaults = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4, "dtype": torch.float32}
    return AttentionSpec(**{**defaults, **changes})


def make_tables(
    limits: Sequence[int],
    *,
    page_sizes: Sequence[int] = (4,),
    max_reqs: int | None = None,
    max_seq_len: int = 64,
    device: torch.device = CPU,
) -> RequestTables:
    """Return loaded tables in which every request owns pages for max_seq_len tokens, in shuffled order."""
    max_reqs = max_reqs or len(limits)
    counts = [max_reqs * -(-max_seq_len // size) for size in page_sizes]
    tables = RequestTables(
        page_sizes=page_sizes, num_pages=counts, max_reqs=max_reqs, max_seq_len=max_seq_len, device=device
    )
    tables.load([owned_pages(len(limits), count // max_reqs, count) for count in counts], limits)
    return tables


def owned_pages(num_reqs: int, each: int, count: int, seed: int = 0) -> list[list[int]]:
    order = random.Random(seed).sample(range(count), count)
    return [order[r * each : (r + 1) * each] for r in range(num_reqs)]


@dataclass
class Shared:
    """Shared state as plain lists, for a model in plain Python; `buffers` puts it on the device."""

    page_sizes: list[int]
    table: list[list[list[int]]]
    """[group][row][column], -1 where no page is owned."""
    limits: list[int]
    seq_lens: list[int]
    num_reqs: int
    """Rows an operation works on; it must leave the rows after them unchanged."""

    @property
    def rows(self) -> int:
        return len(self.limits)

    def page(self, group: int, row: int, position: int) -> int:
        columns = self.table[group][row]
        column = position // self.page_sizes[group]
        return columns[column] if column < len(columns) else -1

    def slot(self, group: int, row: int, position: int) -> int:
        size = self.page_sizes[group]
        return self.page(group, row, position) * size + position % size

    def owns(self, row: int, position: int) -> bool:
        """Return whether the row may write this position: below its limit, with a page in every group."""
        groups = range(len(self.page_sizes))
        return position < self.limits[row] and all(self.page(g, row, position) >= 0 for g in groups)

    def buffers(self, query_len: int = 1) -> BatchBuffers:
        columns = len(self.table[0][0])
        smallest = min(self.page_sizes)
        tables = RequestTables(
            page_sizes=self.page_sizes,
            num_pages=[100] * len(self.page_sizes),
            max_reqs=self.rows,
            max_seq_len=columns * smallest,
            device="cpu",
        )
        tables.block_tables.copy_(torch.tensor(self.table))
        tables.token_limits.copy_(torch.tensor(self.limits))
        batch = BatchBuffers(tables, max_tokens=self.rows * query_len)
        batch.seq_lens.copy_(torch.tensor(self.seq_lens))
        batch.positions.fill_(7)
        batch.slot_mappings.fill_(77)
        return batch


@st.composite
def shared_states(draw: st.DrawFn, max_rows: int = 5) -> Shared:
    """Draw any shared state: several groups, some pages missing, limits above and below the pages."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
    rows = draw(st.integers(1, max_rows))
    columns = draw(st.integers(1, 4))
    # All groups share one table width, so the group with the smallest pages covers the fewest tokens.
    page = st.one_of(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.just(-1))
    row = st.lists(page, min_size=columns, max_size=columns)
    group = st.lists(row, min_size=rows, max_size=rows)
    longest = columns * max(sizes)
    lengths = st.lists(st.integers(0, longest + 2), min_size=rows, max_size=rows)
    return Shared(
        page_sizes=sizes,
        table=draw(st.lists(group, min_size=len(sizes), max_size=len(sizes))),
        limits=draw(lengths),
        seq_lens=draw(lengths),
        num_reqs=draw(st.integers(1, rows)),
    )


def state_of(batch: BatchBuffers) -> dict[str, Any]:
    """Return everything a kernel may write, as lists."""
    fields = {
        name: getattr(batch, name) for name in ("query_start_loc", "seq_lens", "positions", "slot_mappings", "step")
    }
    fields["overflow"] = batch.tables.overflow
    return {name: tensor.tolist() for name, tensor in fields.items()}


def make_cache(spec: AttentionSpec, num_pages: int, seed: int = 0) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_pages, spec.page_size, spec.num_kv_heads)
    return KVCache(
        torch.randn(*shape, spec.head_dim, generator=generator).to(spec.cache_dtype),
        torch.randn(*shape, spec.out_dim, generator=generator).to(spec.cache_dtype),
        scales_of(spec, CPU),
    )


def make_config(**changes: Any) -> ModelConfig:
    fields = {
        "vocab_size": 24,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_q_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_positions": 160,
    }
    return ModelConfig(**{**fields, **changes})


def make_latent_config(*, sinks: bool = True, value_dim: int | None = None, **changes: Any) -> ModelConfig:
    """Return a draft's config for a target of `make_config`, with a window that short texts outgrow."""
    latent = LatentConfig(rope_dim=8, q_rank=24, out_rank=24, value_dim=value_dim, sinks=sinks)
    return make_config(**{"head_dim": 32, "sliding_window": 6, "latent": latent, **changes})


def make_block_config(target: ModelConfig, **changes: Any) -> dict[str, Any]:
    """Return config.json of a two-layer block draft for that target: the next token and 5 masks."""
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 2,
        "num_attention_heads": target.num_q_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "block_size": 6,
        "dflash_config": {"mask_token_id": target.vocab_size - 1, "target_layer_ids": [target.num_layers - 1]},
        **changes,
    }


def make_pair(
    config: ModelConfig | None = None,
    draft_config: ModelConfig | None = None,
    *,
    seed: int = 0,
    context: float = 0.4,
) -> tuple[LlamaTarget, EagleDraft]:
    """Return a random fp32 pair that sometimes agrees: each goes by the last token, and by `context` times the
    context."""
    config = config or make_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = LlamaTarget(config)
        draft = EagleDraft(draft_config or config, target)
        if draft.config.latent is not None:
            for parameter in draft.layers[0].parameters():
                # Move sinks and norm weights off the values they would have if they were forgotten.
                if parameter.dim() == 1:
                    parameter.data.add_(torch.randn_like(parameter) / 4)
    eye = torch.eye(config.hidden_size)
    draft.fuse.weight.data.copy_(torch.cat([eye, 0.1 * eye], 1))
    for layer in (*target.layers, *draft.layers):
        attention_out = layer.out if hasattr(layer, "out") else layer.out_b
        attention_out.weight.data.mul_(context * 4)
        layer.down.weight.data.mul_(context * 4)
    for model in (target, draft):
        model.eval().requires_grad_(False)
    return target, draft


def batch_of(query_lens, seq_lens, pad_reqs, page_size, max_seq_len):
    """Return a batch's block table, lengths and starts; which slots of the pages hold a token; its query tokens."""
    tables = make_tables(seq_lens, page_sizes=(page_size,), max_reqs=4, max_seq_len=max_seq_len)
    batch = BatchBuffers(tables, max_tokens=80)
    num_reqs, num_tokens = batch.load(query_lens, seq_lens, pad_reqs=pad_reqs)
    owned = torch.zeros(tables.num_pages[0], page_size, dtype=torch.bool)
    for pages, length in zip(table := tables.block_tables[0], seq_lens, strict=False):
        at = torch.arange(length)
        owned[pages[at // page_size].long(), at % page_size] = True
    return (table[:num_reqs], batch.seq_lens[:num_reqs], batch.query_start_loc[: num_reqs + 1]), owned, num_tokens


def engine_config(
    *, num_speculative_tokens: int = 0, graph_mode: GraphMode = GraphMode.FULL, **options: Any
) -> EngineConfig:
    """Build an EngineConfig from flat options: a drafter's go to its own config, which 0 tokens leave out. graph_mode:
    of both."""
    names = {field.name for field in fields(DrafterConfig)} & options.keys()
    own: dict[str, Any] = {name: options.pop(name) for name in names}
    drafter = None
    if num_speculative_tokens != 0:
        drafter = DrafterConfig(num_speculative_tokens=num_speculative_tokens, graph_mode=graph_mode, **own)
    return EngineConfig(drafter=drafter, graph_mode=graph_mode, **options)


def make_request(prompt: Sequence[int], **sampling: Any) -> Request:
    """Make a request with these SamplingParams."""
    return Request(prompt=prompt, sampling=SamplingParams(**sampling))


def resampled(request: Request, **changes: Any) -> Request:
    """Return the same request with changed SamplingParams."""
    return replace(request, sampling=replace(request.sampling, **changes))
