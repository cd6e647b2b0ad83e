"""What a newcomer without a GPU waits for: `LLM` of a small published model against `transformers`, on a CPU.

One process has both, and their runs alternate, so that other work on the machine slows both alike. Memory is that of a
process of its own for each, from its imports to after two prompts. Imports are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Quantiles, quantiles
from benchmarks.rows import Bench, BenchRow
from spec_decode import LLM, SamplingParams
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.testing.memory import read

NAME = "cpu"
_ROOT = Path(__file__).resolve().parents[2]
MODEL, DRAFT = _ROOT / "build" / "smollm2", _ROOT / "examples" / "smollm2" / "draft"
_PEER = "transformers"
_CPU = torch.device("cpu")
_REPEATS = 3
_NEW_TOKENS = 32

Continue = Callable[[list[int], int], object]
"""Continues a prompt by this many tokens, greedily."""


def cpu_rows(bench: Bench, model: Path = MODEL, draft: Path = DRAFT, prompt: int = 2501) -> Iterator[BenchRow]:
    """Time loading, a prompt and decoding, and measure memory. Raises CheckpointError without the model."""
    if not model.is_dir():
        raise CheckpointError(f"there is no folder {model}. Run make smollm2.")
    import transformers.modeling_utils  # noqa: F401

    loaders: dict[str, Callable[[Path], Continue]] = {"ours": _ours, _PEER: _theirs}
    loads: dict[str, Callable[[Path], Continue]] = {**loaders, "drafted": partial(_ours, draft=draft)}
    steps = {"ours": 0, _PEER: 0, "drafted": 4}
    times = _alternated({name: partial(load, model) for name, load in loads.items()})
    for name in loads:
        yield _row("load", name, wall_us=times[name], num_speculative_tokens=steps[name])
    run = {name: load(model) for name, load in loads.items()}
    ids = [100 + token for token in range(prompt)]
    for case, tokens, new in (("prompt", ids, 1), ("decode", ids[:4], _NEW_TOKENS)):
        times = _alternated({name: partial(one, tokens, new) for name, one in run.items()})
        for name in run:
            yield _row(
                case, name, wall_us=times[name], num_speculative_tokens=steps[name], context=len(tokens), new_tokens=new
            )
    for name, load in loaders.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            resident = pool.submit(_resident_bytes, load, model, ids).result()
        yield _row("memory", name, num_speculative_tokens=0, context=len(ids), resident_bytes=resident)


def _ours(model: Path, draft: Path | None = None) -> Continue:
    llm = LLM(model, draft=draft, device=_CPU)
    return lambda ids, new: llm.generate([ids], SamplingParams(max_tokens=new, ignore_eos=True))


def _theirs(folder: Path) -> Continue:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)

    @torch.inference_mode()
    def run(ids: list[int], new: int) -> object:
        return model.generate(torch.tensor([ids]), min_new_tokens=new, max_new_tokens=new, do_sample=False)

    return run


def _alternated(calls: dict[str, Callable[[], object]]) -> dict[str, Quantiles]:
    """Time every call, in turn and again, after one untimed turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + _REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                taken[name].append((time.perf_counter() - start) * 1e6)
    return {name: quantiles(samples) for name, samples in taken.items()}


def _resident_bytes(load: Callable[[Path], Continue], model: Path, ids: list[int]) -> int | None:
    """Return what this process has in memory after two prompts."""
    run = load(model)
    run(ids, 1)
    run(ids, 1)
    return read(_CPU).resident


def _row(part: str, name: str, **columns: object) -> BenchRow:
    backend = _PEER if name == _PEER else "triton_paged"
    return {"case": f"{NAME}/{part}", "backend": backend, "peer": name == _PEER, "num_reqs": 1, **columns}
