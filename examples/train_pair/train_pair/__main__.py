"""Train the byte-level pair of this library, or with --draft another draft for its target."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch

from spec_decode.environment import environment
from spec_decode.models import SHIPPED_PAIR
from train_pair.recipe import FURTHER_DRAFTS, Recipe
from train_pair.training import train_draft, train_pair


def main() -> None:
    """Parse the flags, train, save, and print the results."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m train_pair", description=__doc__)
    parser.add_argument("--out", type=Path, default=SHIPPED_PAIR)
    parser.add_argument("--draft", choices=FURTHER_DRAFTS, help="train this draft for the target in --out")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    for name in ("seed", "target_steps", "draft_steps", "batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(recipe, name))
    flags = vars(parser.parse_args())
    out, device, draft = flags.pop("out"), flags.pop("device"), flags.pop("draft")
    if draft and flags["target_steps"] != recipe.target_steps:
        parser.error("--draft does not train the target: leave --target-steps out")
    command = ["python", "-m", "train_pair", *sys.argv[1:]]
    origin = {"command": shlex.join(command), "commit": environment(device).commit}
    if draft:
        record = train_draft(out, draft, Recipe(**flags), device, origin)
    else:
        record = train_pair(out, Recipe(**flags), device, origin)
    print(*record["samples"], sep="\n-----\n")
    for name in ("losses", "accepted_of_4_per_round", "wall_seconds"):
        print(f"{name}: {record[name]}")


if __name__ == "__main__":
    main()
