"""A kernel cache that Triton would fail on during a run is refused before a GPU is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spec_decode.cli.options import CACHE_VARIABLE, require_kernel_cache
from spec_decode.cli.output import UserError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], None]:
    """Makes a cache of these files of one kernel."""

    def cache(files: dict[str, bytes]) -> None:
        folder = tmp_path / "cache" / "KEY"
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        monkeypatch.setenv(CACHE_VARIABLE, str(folder.parent))

    return cache


SOUND = {
    "__grp__k.json": b"{}",
    "k.json": json.dumps({"name": "k"}).encode(),
    "k.cubin": b"\x7fELF\2\1",
    "k.ptx": b"//",
}


@pytest.mark.parametrize("files", [{}, SOUND, SOUND | {"__grp__k.json": b"{"}], ids=["empty", "sound", "group"])
def test_a_cache_that_triton_can_use_is_accepted(cache: Callable[..., None], files: dict[str, bytes]) -> None:
    cache(files)
    require_kernel_cache()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("k.json", b"\xff\xfe", "damaged"),
        ("k.json", b"", "damaged"),
        ("k.json", b"[]", "damaged"),
        ("__grp__k.json", b"[]", "damaged"),
        ("k.cubin", b"", "not a compiled kernel"),
        ("k.cubin", b"garbage", "not a compiled kernel"),
    ],
)
def test_garbage_in_the_cache_is_named(cache: Callable[..., None], name: str, content: bytes, words: str) -> None:
    cache(SOUND | {name: content})
    with pytest.raises(UserError, match=rf"KEY/{name} of Triton's cache is {words}"):
        require_kernel_cache()


@pytest.mark.parametrize("place", ["a_file", "a_file/below", "/proc", "/dev/null/x"])
def test_a_place_that_cannot_be_written_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / place))
    with pytest.raises(UserError, match=f"must be a folder that can be written.*Set {CACHE_VARIABLE} to another"):
        require_kernel_cache()


@pytest.mark.parametrize("verb", ["draft x", "check torch_reference", "demo", "matrix --run torch_reference", "bench"])
def test_every_verb_that_compiles_for_a_gpu_looks_first(
    verb: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/dev/null/x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "Triton keeps compiled kernels in /dev/null/x" in refused(*verb.split(), "--device", "cuda")
