"""A checkpoint of 163 shards, 690 GB and 92,000 tensors: opened, planned and inspected from its headers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest

import streamload
from streamload import Checkpoint
from tests.checkpoint.huge import write_huge
from tests.checkpoint.tools import refused

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="measured with Linux's /proc")]

GIB = 1 << 30

#: Elements of each dtype. With the scales they are the 685 billion of the model card.
ELEMENTS = {"F8_E4M3": 680_571_043_840, "BF16": 3_918_786_560, "F32": 41_555_600}
COUNTS = {"F8_E4M3": 45_808, "BF16": 316, "F32": 45_867}
TENSORS = 91_991
NBYTES = 680_571_043_840 + 2 * 3_918_786_560 + 4 * 41_555_600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_huge(tmp_path_factory.mktemp("huge"))


def _table():
    """The model's names, dtypes and shapes, written down from the paper's numbers and not from the generator's rules."""
    quantised = {
        "self_attn.q_a_proj": (1536, 7168),
        "self_attn.q_b_proj": (24576, 1536),
        "self_attn.kv_a_proj_with_mqa": (576, 7168),
        "self_attn.kv_b_proj": (32768, 512),
        "self_attn.o_proj": (7168, 16384),
    }
    plain = {
        "self_attn.q_a_layernorm": (1536,),
        "self_attn.kv_a_layernorm": (512,),
        "input_layernorm": (7168,),
        "post_attention_layernorm": (7168,),
    }
    dense = {"mlp.gate_proj": (18432, 7168), "mlp.up_proj": (18432, 7168), "mlp.down_proj": (7168, 18432)}
    expert = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}
    homes = ["mlp.shared_experts", *(f"mlp.experts.{number}" for number in range(256))]
    experts = {f"{home}.{name}": shape for home in homes for name, shape in expert.items()}
    extra = {
        "embed_tokens": (129280, 7168),
        "enorm": (7168,),
        "hnorm": (7168,),
        "eh_proj": (7168, 14336),
        "shared_head.norm": (7168,),
        "shared_head.head": (129280, 7168),
    }
    table = {
        f"{name}.weight": ("BF16", shape)
        for name, shape in {
            "model.embed_tokens": (129280, 7168),
            "model.norm": (7168,),
            "lm_head": (129280, 7168),
        }.items()
    }
    for layer in range(62):
        matrices = quantised | (dense if layer < 3 else experts)
        vectors = plain | ({} if layer < 3 else {"mlp.gate": (256, 7168)}) | (extra if layer == 61 else {})
        prefix = f"model.layers.{layer}."
        table |= {f"{prefix}{name}.weight": ("BF16", shape) for name, shape in vectors.items()}
        table |= {f"{prefix}{name}.weight": ("F8_E4M3", shape) for name, shape in matrices.items()}
        # Blocks of 128 x 128: all sizes are multiples, but for the 576 rows that need five.
        table |= {
            f"{prefix}{name}.weight_scale_inv": ("F32", ((rows + 127) // 128, columns // 128))
            for name, (rows, columns) in matrices.items()
        }
        if layer >= 3:
            table[prefix + "mlp.gate.e_score_correction_bias"] = ("F32", (256,))
    return table


def test_it_takes_no_room(folder):
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    assert sum(os.path.getsize(path) for path in paths) > NBYTES
    assert sum(os.stat(path).st_blocks * 512 for path in paths) < GIB // 4


def test_counts_and_bytes(folder):
    checkpoint = Checkpoint.open(folder)
    specs = checkpoint.tensors.values()
    assert (len(checkpoint), checkpoint.nbytes) == (TENSORS, NBYTES)
    assert [os.path.basename(file) for file in checkpoint.files] == [
        f"model-{number:05}-of-000163.safetensors" for number in range(1, 164)
    ]
    assert (checkpoint.ignored, checkpoint.skipped, checkpoint.notes) == ({}, (), ())  # its total_size is right, too
    elements = Counter()
    for spec in specs:
        elements[spec.dtype] += spec.numel
    assert elements == ELEMENTS
    assert Counter(spec.dtype for spec in specs) == COUNTS
    # Every file is covered to its last byte.
    ends = {spec.file: spec.offset + spec.nbytes for spec in specs}
    assert ends == {file: os.path.getsize(file) for file in checkpoint.files}


_MEASURE = """
import sys, time
from streamload import Checkpoint

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))

anonymous, peak, start = memory("RssAnon"), memory("VmHWM"), time.perf_counter()
checkpoint = Checkpoint.open(sys.argv[1])
seconds = time.perf_counter() - start
assert "torch" not in sys.modules
print(len(checkpoint), checkpoint.nbytes, seconds, memory("RssAnon") - anonymous, memory("VmHWM") - peak)
"""


def test_opening_it_takes_little_memory(folder):
    # In a process of its own, so that nothing else is counted and no memory that was freed before is reused.
    done = subprocess.run([sys.executable, "-c", _MEASURE, folder], capture_output=True, text=True, check=True)
    count, nbytes, seconds, anonymous, peak = map(float, done.stdout.split())
    print(
        f"\nopened {count:,.0f} tensors, {nbytes / 1e9:,.1f} GB in {seconds:.2f} s; "
        f"anonymous memory +{anonymous / 2**20:.0f} MiB, at most +{peak / 2**20:.0f} MiB"
    )
    assert (count, nbytes) == (TENSORS, NBYTES)
    assert anonymous < GIB
    assert peak < GIB


def test_it_is_planned_against_a_table_made_without_it(folder):
    table = _table()
    assert len(table) == TENSORS
    checkpoint = Checkpoint.open(folder)
    start = time.perf_counter()
    plan = streamload.plan(table, checkpoint, memory_limit="64MiB")
    print(f"\nplanned {len(plan.placements):,} placements in {time.perf_counter() - start:.2f} s")
    assert plan.ok
    assert (plan.missing_keys, plan.unexpected_keys, plan.mismatched_keys) == ([], [], [])
    assert (plan.casts, plan.dropped, plan.notes) == ([], {}, [])
    assert {placement.target for placement in plan.placements} == table.keys()
    assert plan.bytes_to_read == NBYTES
    assert plan.forecast.params_bytes == NBYTES
    assert plan.forecast.staging_bytes <= 64 << 20


def test_what_does_not_fit_is_found_in_the_crowd(folder):
    table = _table()
    del table["model.layers.30.mlp.experts.200.down_proj.weight"]
    table["model.layers.62.input_layernorm.weight"] = ("BF16", (7168,))
    table["model.layers.3.self_attn.o_proj.weight"] = ("F8_E4M3", (7168, 16383))
    table["lm_head.weight"] = ("F32", (129280, 7168))
    plan = streamload.plan(table, folder)
    assert not plan.ok
    assert plan.unexpected_keys == ["model.layers.30.mlp.experts.200.down_proj.weight"]
    assert plan.missing_keys == ["model.layers.62.input_layernorm.weight"]
    (mismatch,) = plan.mismatched_keys
    assert mismatch.name == "model.layers.3.self_attn.o_proj.weight"
    assert (mismatch.expected, mismatch.found) == ("shape [7168, 16383]", "shape [7168, 16384]")
    assert [(cast.name, cast.source, cast.target) for cast in plan.casts] == [("lm_head.weight", "BF16", "F32")]


def test_inspect_shows_all_of_it_as_json(folder):
    code = "import sys; from streamload.cli import main; main(['inspect', '--json', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert (len(shown["tensors"]), shown["nbytes"], len(shown["files"])) == (TENSORS, NBYTES, 163)
    assert {name: (each["dtype"], tuple(each["shape"])) for name, each in shown["tensors"].items()} == _table()
    assert sum(each["nbytes"] for each in shown["tensors"].values()) == NBYTES


def test_one_byte_too_few_is_found(folder):
    path = os.path.join(folder, "model-00163-of-000163.safetensors")
    size = os.path.getsize(path)
    os.truncate(path, size - 1)
    try:
        error = refused(folder, f"expected {size:,} bytes", f"found {size - 1:,}", "1 are missing", path=path)
    finally:
        os.truncate(path, size)
    assert error.tensor == "lm_head.weight"
    assert len(Checkpoint.open(folder)) == TENSORS
