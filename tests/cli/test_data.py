"""`cuboid data`: build, show and verify, and a training on what was built."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cuboid.cli.main import main
from tests.data.corpora import DOCUMENTS, train_tokenizer, write_formats


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return write_formats(tmp_path / "corpus", DOCUMENTS)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["data", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_build_show_and_verify(corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    tokens = sum(len(text.encode()) + 1 for text in DOCUMENTS)
    built = shown(capsys, "build", "corpus/text", "-o", "store", "--workers", "1")
    assert f"store: {tokens:,} tokens of 7 documents, vocabulary 257" in built
    assert "tokens/s" in built
    assert "All of it was there already." in shown(capsys, "build", "corpus/text", "-o", "store")
    assert "the first document begins: 'The first document.\\nIt has two lines.'" in shown(capsys, "show", "store")
    assert "Every byte is what the manifest says." in shown(capsys, "verify", "store")
    assert f"store/tokens: {tokens:,} tokens of 7 documents, uint16" in shown(capsys, "show", "store/tokens")


def test_json_of_each_action(corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = str(train_tokenizer(Path("tokenizer.json")))
    sources = ["corpus/lines.jsonl.gz", "corpus/rows.parquet", "corpus/dataset"]
    report = json.loads(
        shown(capsys, "build", *sources, "-o", "store", "--tokenizer", tokenizer, "--workers", "1", "--json")
    )
    assert report["documents"] == 21 and report["tokens_per_second"] > 0 and report["store"] == "store"
    for action, verified in (("show", False), ("verify", True)):
        manifest = json.loads(shown(capsys, action, "store", "--json"))
        assert manifest["verified"] is verified and manifest["tokens"] == report["tokens"]
        assert [source["name"] for source in manifest["sources"]][:2] == ["lines.jsonl.gz", "rows.parquet"]
    assert json.loads(shown(capsys, "verify", "store/tokens", "--json"))["documents"] == 21
    assert "The first document" in shown(capsys, "show", "store")


def test_names_move_no_cursor(corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    store = "store\x1b]0;pwn\x07"
    for action, more in (("build", ["corpus/lines.jsonl"]), ("show", []), ("verify", [])):
        said = shown(capsys, action, *more, *(["-o", store] if more else [store]))
        assert "store\\x1b]0;pwn\\x07: " in said and all(map(str.isprintable, said.splitlines())), action
    assert "store\\x1b]0;pwn\\x07/tokens: " in shown(capsys, "show", f"{store}/tokens")


def test_what_is_wrong_is_one_sentence(corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "data", "build", "corpus/text") == (
        "error: data build needs a name for the store; add -o text-tokens\n"
    )
    assert "source=nowhere does not exist" in refused(capsys, "data", "build", "nowhere", "-o", "store", "--json")
    assert "nowhere.bin is missing" in refused(capsys, "data", "show", "nowhere")
    shown(capsys, "build", "corpus/text", "-o", "store", "--workers", "1")
    tokens = Path("store/tokens.bin")
    tokens.write_bytes(b"\1" + tokens.read_bytes()[1:])
    assert "store/tokens.bin is damaged: its checksum is" in refused(capsys, "data", "verify", "store")
    assert "store/tokens.bin is damaged" in refused(capsys, "train", "--set", "data.source=store")
    assert not Path("runs").exists()


def test_a_store_is_trained_on(corpus: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "build", "corpus/text", "-o", "store", "--workers", "1")
    overrides = ["data.source=store", "data.mask_across_documents=true", "training.steps=3", "training.sequence=32"]
    options = [word for override in overrides for word in ("--set", override)]
    assert main(["train", *options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 3 and summary["last_loss"] < summary["first_loss"]


def test_looking_at_data_does_not_import_torch(corpus: dict[str, Path]) -> None:
    code = """
import sys
from cuboid.cli.main import main
assert main(["data", "build", "corpus/lines.jsonl", "-o", "store", "--workers", "1", "--json"]) == 0
assert main(["data", "verify", "store", "--json"]) == 0
print("torch" in sys.modules, "pyarrow" in sys.modules, "zstandard" in sys.modules, "tokenizers" in sys.modules)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.split()[-4:] == ["False"] * 4


@pytest.mark.parametrize(("package", "source"), [("pyarrow", "rows.parquet"), ("zstandard", "lines.jsonl.zst")])
def test_a_package_that_is_missing_is_named(package: str, source: str, corpus: dict[str, Path]) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from cuboid.cli.main import main
sys.exit(main(["data", "build", "corpus/{source}", "-o", "store", "--workers", "1", "--json"]))
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert finished.stderr == f"error: corpus/{source} needs a package that is not installed; pip install {package}\n"
