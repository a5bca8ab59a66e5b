"""Peak memory of loading transformers models in fp32 from bf16, ours and ``from_pretrained``'s, each in a fresh process.

    python bench/bench_architectures.py [--width 1024] [--layers 8] [--big]

Prints a table. ``--big`` adds a Qwen3-MoE of 2.4 GB (4.8 GB of parameters; from_pretrained needs about 9 GB).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.integrations

from tests.integrations.architectures import Sizes, architectures

ROOT = Path(__file__).parent.parent
BIG = {"width": 1024, "layers": 8, "vocabulary": 8000, "experts": 96}


def call(way: str, architecture: str, folder: str, sizes: dict[str, int]) -> Any:
    command = [sys.executable, "-m", "tests.integrations.measured", way, architecture, folder, json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{way} of {architecture} failed:\n{done.stderr}")
    return None if way == "save" else json.loads(done.stdout.splitlines()[-1])


def row(architecture: str, sizes: dict[str, int]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        call("save", architecture, folder, sizes)
        ours, theirs = (call(way, architecture, folder, sizes) for way in ("streamload", "from_pretrained"))
    if ours["sum"] != theirs["sum"]:
        raise SystemExit(f"{architecture}: the two loaded different values")
    mib = [f"{number / 2**20:,.0f}" for number in (ours["stored"], ours["params"])]
    peaks = [f"{(each['params'] + each['extra']) / 2**20:,.0f}" for each in (ours, theirs)]
    extra = [f"{each['extra'] / 2**20:,.0f}" for each in (ours, theirs)]
    return f"| {' | '.join([architecture, *mib, *peaks, *extra])} | {ours['seconds']:.2f} | {theirs['seconds']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--big", action="store_true")
    options = parser.parse_args()
    sizes = {"width": options.width, "layers": options.layers, "vocabulary": 8000, "experts": 12}
    heads = ("model", "stored MiB", "parameters MiB", "peak, ours", "peak, from_pretrained")
    print(f"| {' | '.join(heads)} | beyond parameters, ours | theirs | s, ours | theirs |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for architecture in architectures(Sizes()):
        print(row(architecture, sizes), flush=True)
    if options.big:
        print(row("Qwen3-MoE", BIG).replace("Qwen3-MoE", "Qwen3-MoE, 96 experts"), flush=True)


if __name__ == "__main__":
    main()
