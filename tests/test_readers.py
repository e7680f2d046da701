"""Whatever is read comes through the guarded readers, and each kind of bad input ends in one sentence."""

from __future__ import annotations

import ast
import gzip
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cuboid import readers
from cuboid.cli.main import main
from cuboid.console import say
from cuboid.data.documents import find_inputs, read_rows
from cuboid.data.tokenizer import byte_tokenizer, load_tokenizer
from cuboid.errors import LONGEST, UserError, one_sentence
from cuboid.outputs import check_output, write_output
from cuboid.readers import (
    LARGEST_LINE,
    Missing,
    Unreadable,
    open_inflated,
    open_plain,
    open_safetensors,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_line,
    read_text,
    read_toml,
)
from cuboid.spec.load import build_model
from cuboid.spec.run import build_run

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import junk  # noqa: E402

# Every way to read a file, by the name of the call.
READS = {
    *(
        "read_text",
        "read_bytes",
        "safe_open",
        "memmap",
        "fromfile",
        "from_file",
        "memory_map",
        "ParquetFile",
        "GzipFile",
    ),
    *("mmap", "cat_file", "OSFile"),
}
ELSEWHERE = {
    "checkpoint/location.py": "the files of checkpoints, here and in stores: whoever reads asks for the size first",
    "checkpoint/memory/node_state.py": "memory of this node that the job itself has made",
    "checkpoint/memory/restore.py": "the same",
    "cli/main.py": "the null device",
    "cost/constants.py": "a file of the package",
    "cost/estimate.py": "a file of the package",
    "cost/published.py": "a file of the package",
    "data/build.py": "a folder, to bring its names to the disk",
    "generate/kernels.py": "a file of the package",
    "kernels/pinned_memory.py": "memory without a file",
    "launch/capacity.py": "what the system says of its limits",
    "launch/oom.py": "what the system says of this process",
    "launch/rank.py": "what the system says of its cores",
    "launch/supervisor.py": "what a rank of this job wrote as it ended",
    "parallel/shm_collectives.py": "memory that ranks of this job share",
    "probe/one_rank.py": "what the system says of this process",
    "report/page.py": "a file of the package",
    "report/watch.py": "a folder, to ask who holds it",
    "secure_channel.py": "the job's secret, a file that its user alone may read",
    "resilience/hang_dumps.py": "what ranks of this job wrote, and what the system says of them",
    "resilience/replan.py": "what the system says of its GPUs",
    "outputs.py": "nothing: what it opens is written",
    "resilience/second_watch.py": "the heartbeat of its rank",
    "resilience/watchdog.py": "heartbeats of this job's ranks",
    "spec/cluster.py": "a file of the package",
    "spec/load.py": "files of the package",
    "telemetry/heartbeat.py": "the heartbeat itself, and what the system says of a process",
    "training/claim.py": "a folder, to hold it",
}
"""Files that read by other means -> what they read, none of which comes from a user."""
PARSES = {"cli/evaluate.py", "launch/coordinator_rpc.py", "launch/watched.py", "telemetry/heartbeat.py"}
PARSES |= {"checkpoint/memory/node_state.py"}
"""Files that parse JSON by other means: messages of this job's processes."""


def calls(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            modes = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            reads = any(mode in ("r", "rb", "r+b", "rt") for mode in modes)
            if owner in ("json", "tomllib", "gzip", "tarfile", "zipfile", "pickle") and name in (
                "load",
                "loads",
                "open",
            ):
                found.add(f"{owner}.{name}")
            elif (name in READS and isinstance(node.func, ast.Attribute)) or (name == "safe_open"):
                found.add(name)
            elif name == "open" and (reads or owner == "os"):
                found.add("open")
    return found


def test_nothing_reads_files_but_the_readers() -> None:
    wrong, unused = [], set(ELSEWHERE)
    for path in sorted((ROOT / "cuboid").rglob("*.py")):
        name = str(path.relative_to(ROOT / "cuboid"))
        found = calls(path) if name != "readers.py" else set()
        unused -= {name} if found else set()
        parses = {each for each in found if each.startswith(("json.", "tomllib."))}
        if (parses and name not in PARSES) or (found - parses - {"pickle.loads"} and name not in ELSEWHERE):
            wrong.append(f"{name}: {', '.join(sorted(found))}")
    assert not wrong, "\n".join(("read these through cuboid/readers.py:", *wrong))
    assert not unused, f"these no longer read anything: {unused}"


# Files that are none.

PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "is a FIFO, not a file"),
    "folder": (os.mkdir, "is a folder, not a file"),
    "socket": (lambda path: _bind(path), "cannot be read|is a socket, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
    "loop": (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
    "missing": (lambda path: None, "does not exist"),
}


def _bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("read", [open_plain, read_bytes, read_text, read_toml, read_json, open_safetensors])
def test_only_plain_files_are_read(tmp_path: Path, kind: str, read: Callable[[Path], object]) -> None:
    make, reason = PLACES[kind]
    make(tmp_path / "file")
    with pytest.raises(Unreadable, match=reason):
        read(tmp_path / "file")


def test_a_path_with_a_nul_is_missing_and_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="holds a NUL"):
        read_bytes("a\0b")
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 1 << 40)
    for read in (read_bytes, read_text, read_toml, read_json):
        with pytest.raises(Unreadable, match="has 1,099,511,627,776 bytes, more than"):
            read(tmp_path / "holes")


# Tables.

TOML = {
    "a = " + "[" * 5000: "nested too deeply",
    "a = " + "[" * 100 + "]" * 100: "nested more than 64 deep|nested too deeply",
    "[" + "a." * 100 + "a]": "nested more than 64 deep",
    "a = " + "9" * 5000: "thousands of digits",
    "a = 99999999999999999999": "more than 64 bits",
    'a = "\\u0000"': "holds a NUL",
    '"\\u0000" = 1': "the key .* holds a NUL",
    "a = \0": "at line 1",
}
JSON = {
    "[" * 100_000: "nested too deeply",
    "[" * 100 + "]" * 100: "nested more than 64 deep",
    "9" * 5000: "thousands of digits",
    "[99999999999999999999]": "more than 64 bits",
    "NaN": "NaN is no number",
    "-Infinity": "Infinity is no number",
    "[1e999]": "larger than a float can be",
    '"\\ud800"': "half a character",
    '{"\\u0000": 1}': "the key .* holds a NUL",
    b"\xff\xfe{": "utf-16|utf-8",
}


@pytest.mark.parametrize("text", TOML, ids=range(len(TOML)))
def test_toml_beyond_bounds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=TOML[text]):
        parse_toml(text)


@pytest.mark.parametrize("text", JSON, ids=range(len(JSON)))
def test_json_beyond_bounds_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=JSON[text]):
        parse_json(text)


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_broken_tables_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Hundreds of mutated ones: nothing but a sentence comes out."""
    good = {"toml": b'model = "tiny-llama"\n[training]\nsteps = 4\n', "json": b'{"a": [1, {"b": "c"}], "d": 1.5}'}[kind]
    read = {"toml": read_toml, "json": read_json}[kind]
    random, refused = Random(0), 0
    for _ in range(150):
        (tmp_path / "file").write_bytes(random.choice((junk.FORMATS[kind], junk.broken_bytes))(good, random))
        try:
            table = read(tmp_path / "file")
            assert isinstance(table, dict)
            if kind == "toml":
                build_run(table)
        except UserError as error:
            refused += 1
            assert len(one_sentence(str(error))) <= LONGEST + 3
    assert refused > 50


def test_a_model_that_is_based_on_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"')
    (tmp_path / "b.toml").write_text('base = "a.toml"')
    with pytest.raises(UserError, match="based on itself"):
        build_model({"base": "a.toml"}, tmp_path)


def test_an_error_is_one_line_of_a_readable_length() -> None:
    assert one_sentence("a\nb\0c\x1b") == "a\\nb\\x00c\\x1b"
    long = one_sentence("field=" + "9" * 5000 + "; use field=1")
    assert len(long) < 700 and long.startswith("field=9") and long.endswith("; use field=1")


# Sizes that no memory holds, numbers that are none.


@pytest.mark.parametrize(
    "setting",
    [
        *("model.layers=1000000000", "model.hidden=1099511627776", "model.vocab=99999999999", "model.heads=1000000"),
        *("training.global_batch=1000000000000", "training.threads_per_rank=1000000", "training.sequence=99999999999"),
        *("evaluation.batches=1000000000000", "layout.dp=1000000000", "layout.micro_batch=1000000000"),
        *("training.steps=" + "9" * 400, "training.steps=" + "9" * 5000, "learning_rate.peak=" + "9" * 400),
        *("checkpoint.timeout_seconds=1e308", "resilience.setup_seconds=1e300", "learning_rate.peak=1e999"),
        *("resilience.spike_window=1000000000000", "samples.max_tokens=1000000000000", "profile.ranks=" + "9" * 5000),
        *("output.folder=a\0b", "output.folder=\udc80", "data.source=\ud800"),
    ],
    ids=lambda text: str(text)[:30].encode("unicode_escape").decode(),
)
def test_absurd_values_are_refused_at_once(setting: str) -> None:
    begun = time.process_time()  # another program may have the cores meanwhile
    with pytest.raises(
        UserError, match=setting.partition("=")[0].replace("layout.", "").rpartition(".")[2] + "|world_size"
    ):
        build_run({"model": "tiny-llama", "evaluation": {}, "samples": {}}, [setting])
    assert time.process_time() - begun < 5


def test_samples_without_prompts_are_refused() -> None:
    with pytest.raises(UserError, match=r"samples.prompts=\[\] has nothing to continue"):
        build_run({"model": "tiny-llama", "samples": {"every": 1, "prompts": []}})


# Compressed files, columns, tensors, tokenizers.


@pytest.mark.parametrize(
    ("name", "block"),
    [
        *(("bomb.jsonl.gz", b"a"), ("bomb.jsonl.gz", b"\n"), ("bomb.txt.gz", b"\0"), ("bomb.jsonl.zst", b"a")),
        ("bomb.jsonl.gz", b'{"text": "%s"}\n' % (b"a" * 50)),  # rows that each are good
    ],
)
def test_a_bomb_is_refused_before_it_grows(tmp_path: Path, name: str, block: bytes) -> None:
    path, begun = tmp_path / name, time.process_time()
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(block * ((4 << 20) // len(block))) * 500)  # 2 GB in 2 MB
    else:
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.compress(block * (4 << 20)) * 500)
    with pytest.raises(UserError, match=r"bomb.* (holds more than|has more than|has 1,000,001 empty lines)"):
        list(read_rows(find_inputs([str(path)])[0], ["text"]))
    assert time.process_time() - begun < 20


def test_a_line_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "line.jsonl"
    path.touch()
    os.truncate(path, LARGEST_LINE + 10)
    _, stream = open_inflated(path)
    with stream, pytest.raises(UserError, match="line 1 has more than the 67,108,864 bytes"):
        read_line(stream, path, 0)


def test_columns_that_are_no_text_and_damaged_files_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    not_text = pyarrow.array([b"\xff\xfe", b"a"], type=pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": not_text}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet is damaged"):
        list(read_rows(find_inputs([str(tmp_path / "a.parquet")])[0], ["text"]))
    good = pyarrow.table({"text": ["a row", "another row"] * 20})
    parquet.write_table(good, tmp_path / "good.parquet")
    with pyarrow.OSFile(str(tmp_path / "good.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, good.schema) as out:
        out.write_table(good)
    random, refused = Random(0), 0
    for number in range(120):
        name = ("good.parquet", "good.arrow")[number % 2]
        path = tmp_path / f"bad{Path(name).suffix}"
        path.write_bytes(junk.broken_bytes((tmp_path / name).read_bytes(), random))
        try:
            list(read_rows(find_inputs([str(path)])[0], ["text"]))
        except UserError:
            refused += 1
    assert refused > 40


def test_rows_that_take_no_bytes_in_their_file_are_refused_before_they_are_made(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def refusal(name: str, column: Any) -> str:
        table = pyarrow.table({"text": column})
        path = tmp_path / name
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
                out.write_table(table)
        with pytest.raises(UserError) as refused:
            list(read_rows(find_inputs([str(path)])[0], ["text"]))
        return str(refused.value)

    assert "far beyond its own size" in refusal("nothing.arrow", pyarrow.nulls(1 << 30))
    word = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int8()), ["x" * 100_000])
    assert "far beyond its own size" in refusal("word.arrow", word)
    ends = pyarrow.array([2**31 - 1])
    assert "far beyond its own size" in refusal("run.arrow", pyarrow.RunEndEncodedArray.from_arrays(ends, ["a"]))
    assert "far beyond its own size" in refusal("words.parquet", pyarrow.array(["x" * 1000] * 100_000))
    assert "is damaged" in refusal("day.parquet", pyarrow.array([2**31 - 1], pyarrow.date32()))


def test_broken_tensors_are_read_or_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    path, random, refused = tmp_path / "x.safetensors", Random(0), 0
    save_file({"a": torch.zeros(4, 4), "b": torch.ones(3)}, path)
    good = path.read_bytes()
    for _ in range(60):
        path.write_bytes(junk.broken_safetensors(good, random))
        try:
            open_safetensors(path)
        except UserError:
            refused += 1
    assert refused > 20
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(UserError, match="do not hold the header they begin with"):
        open_safetensors(path)


def _tokenizer(**changes: Any) -> dict[str, Any]:
    return {**byte_tokenizer(), **changes}


RUNAWAY = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
TOKENIZERS = {
    "no model": ({"version": "1.0"}, "is not a tokenizer.json"),
    "no vocabulary": (
        _tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]),
        "vocabulary is empty",
    ),
    "huge ids": (_tokenizer(model={"type": "BPE", "vocab": {"a": 2**31}, "merges": []}), "has a token 2147483648"),
    "endless texts": (_tokenizer(normalizer={"type": "Prepend", "prepend": "x" * 10_001}), "10,001 times as long"),
    "growing texts": (
        _tokenizer(
            normalizer={
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 4,
            }
        ),
        "1,000,000,000,000 times as long",
    ),
    "nested": (_tokenizer(normalizer=json.loads("[" * 90 + "]" * 90)), "nested more than 64 deep"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_that_are_none_are_refused(tmp_path: Path, kind: str) -> None:
    table, reason = TOKENIZERS[kind]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match=reason):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_tokenizer_whose_pattern_runs_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(_tokenizer(pre_tokenizer=RUNAWAY)))
    monkeypatch.setattr("cuboid.data.tokenizer.TRIAL_SECONDS", 3.0)
    with pytest.raises(UserError, match="takes for ever on some texts"):  # whether the library gives up or is ended
        load_tokenizer(str(path))


def test_a_text_that_is_no_document_is_not_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("cuboid.data.tokenizer.LONGEST_TEXT", 1000)
    assert len(tokenizer.encode(["a" * 1000])[0]) == 1000
    with pytest.raises(UserError, match=r"a text of 1,001 characters and takes 1,000 at once; write it as JSON Lines"):
        tokenizer.encode(["a" * 1001])


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    for name in ("byte", str(tmp_path / "tokenizer.json")):
        with pytest.raises(UserError, match=r"half a character|cannot encode"):
            load_tokenizer(name).encode(["a\ud800"])


def test_the_longest_text_of_a_tokenizer_that_has_no_longest() -> None:
    """As transformers writes it into every tokenizer_config.json."""
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}')["model_max_length"] > 2**63


def test_tokens_and_what_a_model_writes_may_hold_nuls(tmp_path: Path) -> None:
    table = byte_tokenizer()
    table["model"]["vocab"]["\0"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).vocabulary == 301
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "text": "a\\u0000b"}\n{"step": 2, "text": "\\ud800"}\n\n')
    with pytest.raises(UserError, match="its line 2 is no row"):
        readers.read_rows(tmp_path / "samples.jsonl")
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "text": "a\\u0000b"}\n')
    assert readers.read_rows(tmp_path / "samples.jsonl") == [{"step": 1, "text": "a\0b"}]


def test_what_is_printed_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of folders and models of a run that somebody else wrote."""
    say("one\x1b]0;pwn\x07\ntwo")
    say("one\x9b2J", as_warning=True)
    assert tuple(capsys.readouterr()) == ("one\\x1b]0;pwn\\x07\ntwo\n", "warning: one\\x9b2J\n")
    file, folder = tmp_path / "run.toml", f"{tmp_path}/\x1b]0;pwn\x07"
    file.write_text('model = {base = "tiny-llama", layers = 1, name = "na\\u001b[31mme"}\n')
    settings = ["training.steps=1", "training.sequence=8", "training.global_batch=1", f"output.folder={folder}"]
    assert main(["train", str(file), *(part for each in settings for part in ("--set", each))]) == 0
    said = capsys.readouterr()
    assert "na\\x1b[31mme: " in said.out and "/\\x1b]0;pwn\\x07/metrics.jsonl" in said.out
    assert all(map(str.isprintable, (said.out + said.err).split("\n")))


def test_a_byte_order_mark_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "tiny-llama"\n', encoding="utf-8-sig")
    sentence = "run.toml begins with a byte-order mark, which TOML has not; save it as UTF-8 without one"
    with pytest.raises(Unreadable, match=sentence):
        read_toml(tmp_path / "run.toml")


def test_output_to_a_fifo_waits_for_nobody(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    check_output(fifo)
    with pytest.raises(UserError, match=r"fifo cannot be written: No such device or address"):
        write_output(fifo, "text")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    check_output(fifo)
    write_output(fifo, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_a_header_that_a_disk_does_not_read_is_a_sentence(tmp_path: Path) -> None:
    """The memory of a process is a file whose first page fails as a broken disk does."""
    link = tmp_path / "model.safetensors"
    link.symlink_to("/proc/self/mem")
    with pytest.raises(Unreadable, match="cannot be read: Input/output error"):
        readers.read_safetensors_header(link)


def test_a_header_that_is_read_for_minutes_is_refused(tmp_path: Path) -> None:
    """A hole on the disk in the place of a million tensors: it is not read at all."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 99_000_000))
    os.truncate(path, 100_000_000)
    with pytest.raises(UserError, match="begins with a header of 99,000,000 bytes, more than the 33,554,432 it may"):
        readers.read_safetensors_header(path)
