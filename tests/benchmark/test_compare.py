"""The historic probe clones what ours does not, and ``streamload bench`` shows it."""

import json

import pytest
from click.testing import CliRunner

from streamload import LoadError, count_clones
from streamload.benchmark import WAYS, Measured, compare
from streamload.benchmark.historic import historic_load
from streamload.cli import cli
from streamload.testing import RingSource, write_safetensors
from tests.pooling.models import Causal, GemmaLike, causal, check_gemma, gemma_like


def test_the_historic_probe_clones_all_2000_tensors_and_loads_them():
    tensors = gemma_like(1999)
    model, ring = GemmaLike(1999), RingSource(tensors)
    with count_clones() as clones:
        historic_load(model, ring)
    assert (clones.count, ring.clones) == (2000, 2000)
    assert model.got == list(tensors)
    check_gemma(model)


def test_the_historic_probe_stops_at_a_hit_which_it_clones():
    model, ring = Causal(), RingSource(causal("model."))
    historic_load(model, ring)
    assert (ring.clones, model.got[0]) == (1, "lm_head.weight")


def test_the_historic_probe_lets_a_head_decide_over_the_body():
    with pytest.raises(ValueError, match=r"no parameter embed_tokens.weight"):
        historic_load(Causal(), RingSource(causal("")))


@pytest.mark.slow
def test_each_way_is_measured_in_a_process_of_its_own(tmp_path):
    tensors = {name: each.expand(256 * 1024).clone() for name, each in gemma_like(15, size=1).items()}  # 16 MiB
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    found = [*compare(path, ["mmap"])]
    assert [each.way for each in found] == list(WAYS)
    assert [each.clones for each in found] == [0, 16, 0]
    assert [each.clone_bytes for each in found] == [0, 16 << 20, 0]
    assert all(each.params == 16 << 20 for each in found)
    ours, historic, _ = (each.beyond for each in found)
    assert ours < 4 << 20
    assert historic >= 12 << 20  # sampled


def test_a_process_that_fails_is_told(tmp_path):
    with pytest.raises(LoadError, match=r"mmap, streamload: .*nothing"):
        [*compare(tmp_path / "nothing", ["mmap"])]


def test_the_command_prints_json_and_checks_its_arguments(tmp_path, monkeypatch):
    path = write_safetensors(tmp_path / "m.safetensors", gemma_like(15))
    found = [Measured("mmap", way, 5, 1, 2, 0.5, 1024) for way in WAYS]
    monkeypatch.setattr("streamload.benchmark.compare", lambda location, backends: iter(found))
    done = CliRunner().invoke(cli, ["bench", path, "--backend", "mmap", "--json"])
    assert [each["way"] for each in json.loads(done.output)] == list(WAYS)
    lines = CliRunner().invoke(cli, ["bench", path]).output.splitlines()
    assert lines[0].endswith("m.safetensors: 1.0 KiB of parameters")
    done = CliRunner().invoke(cli, ["bench", path, "--backend", "disk"])
    assert "backend='disk': expected one of" in str(done.exception)
