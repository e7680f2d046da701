"""Building a store: the same bytes with any number of workers, and after being killed at any moment."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cuboid.data import build as module
from cuboid.data import workers as working
from cuboid.data.build import BuildRequest, Progress, build
from cuboid.data.store import check_store, open_store
from cuboid.errors import RankError, UserError
from tests.data.corpora import DOCUMENTS, train_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six chunks of documents, and the tokenizer beside them."""
    folder = tmp_path_factory.mktemp("corpus")
    train_tokenizer(folder / "tokenizer.json")
    with (folder / "corpus.jsonl").open("w") as file:
        for number in range(600):
            file.write(json.dumps({"text": f"document {number}: {DOCUMENTS[number % 7]} " * (1 + number % 3)}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST_CHUNK", 1 << 17)


def request(corpus: Path, output: Path, workers: int = 1, restart: bool = False) -> BuildRequest:
    return BuildRequest(
        sources=(str(corpus / "corpus.jsonl"),),
        output=output,
        tokenizer=str(corpus / "tokenizer.json"),
        workers=workers,
        restart=restart,
    )


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


@pytest.fixture(scope="module")
def whole(corpus: Path) -> dict[str, bytes]:
    """What a build by one process, never interrupted, leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALLEST_CHUNK", 1 << 17)
        build(request(corpus, corpus / "whole"))
    return contents(corpus / "whole")


class Stopped(Exception):
    """Stands for whatever ends a build before its time."""


class StopAfter:
    def __init__(self, parts: int) -> None:
        self._left = parts + 1  # the first report comes before the first part

    def __call__(self, progress: Progress) -> None:
        self._left -= 1
        if self._left < 1:
            raise Stopped


@pytest.mark.parametrize("threads", [8, 1])
def test_any_number_of_workers_makes_the_same_bytes(
    corpus: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(working, "THREADS", threads)
    seen: list[Progress] = []
    report = build(request(corpus, tmp_path / "store", workers=3), seen.append)
    assert contents(tmp_path / "store") == whole
    assert not (tmp_path / "store.partial").exists()
    assert [progress.read for progress in seen] == sorted(progress.read for progress in seen)
    assert (
        seen[-1].read == seen[-1].total
        and seen[-1].tokens == report.tokens == open_store(corpus / "whole").manifest.tokens
    )
    assert len(seen) > 6 and report.documents == 600 and report.resumed_tokens == 0 and report.tokens_per_second > 0


def test_a_build_goes_on_where_it_stopped(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        build(request(corpus, tmp_path / "store"), StopAfter(3))
    assert not (tmp_path / "store").exists()
    finished = sorted((tmp_path / "store.partial" / "parts").glob("*.json"))
    assert len(finished) == 3
    stamps = [path.stat().st_mtime_ns for path in finished]
    seen: list[int] = []

    def report(progress: Progress) -> None:
        # Finished parts are not written again.
        seen.extend(path.stat().st_mtime_ns for path in finished if path.exists())

    again = build(request(corpus, tmp_path / "store"), report)
    assert contents(tmp_path / "store") == whole
    assert 0 < again.resumed_tokens < again.tokens
    assert set(seen) == set(stamps)


@pytest.mark.parametrize("harm", ["flip", "cut", "record", "missing"])
def test_parts_that_were_harmed_are_made_again(
    harm: str, corpus: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        build(request(corpus, tmp_path / "store"), StopAfter(4))
    tokens, record = (tmp_path / "store.partial" / "parts" / f"000001.{ending}" for ending in ("bin", "json"))
    if harm == "flip":
        data = bytearray(tokens.read_bytes())
        data[100] ^= 1
        tokens.write_bytes(data)
    elif harm == "cut":
        os.truncate(tokens, 100)
    elif harm == "record":
        record.write_text(record.read_text()[:-5])
    else:
        tokens.unlink()
    build(request(corpus, tmp_path / "store"))
    assert contents(tmp_path / "store") == whole


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(child) for child in found.split()]


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_is_no_unfinished_build_is_not_removed(corpus: Path, tmp_path: Path, kind: str, restart: bool) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    aside = tmp_path / "store.partial"
    make = {"folder": (tmp_path / "mine").rename, "link": aside.symlink_to, "file": lambda _: aside.write_text("mine")}
    make[kind](aside if kind == "folder" else tmp_path / "mine")
    with pytest.raises(UserError, match=r"store\.partial is no unfinished build, and would be removed; use another"):
        build(request(corpus, tmp_path / "store", restart=restart))
    kept = {"folder": aside / "thesis.txt", "link": tmp_path / "mine" / "thesis.txt", "file": aside}
    assert kept[kind].read_text() == "mine"


def test_killed_without_warning_it_goes_on_and_leaves_no_process(corpus: Path, tmp_path: Path) -> None:
    # As many bytes as three real chunks, through the command line, killed again and again until it is done.
    source = tmp_path / "corpus.jsonl"
    source.write_bytes((corpus / "corpus.jsonl").read_bytes() * 3)
    options = ["--tokenizer", str(corpus / "tokenizer.json"), "--workers", "2", "--json"]
    command = [sys.executable, "-m", "cuboid.cli.main", "data", "build", str(source)]
    parts = tmp_path / "store.partial" / "parts"
    kills = 0
    while kills < 2:
        process = subprocess.Popen([*command, "-o", str(tmp_path / "store"), *options], stdout=subprocess.DEVNULL)
        while process.poll() is None and len(list(parts.glob("[0-9]*.json"))) <= kills:
            time.sleep(0.005)
        if process.poll() is None:
            workers = children(process.pid)
            process.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + 60
            while any(map(alive, workers)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not any(map(alive, workers))
        if process.wait() == -signal.SIGKILL and not (tmp_path / "store").exists():
            kills += 1
        else:  # on a busy machine it may be done before it is seen
            assert process.returncode in (0, -signal.SIGKILL)
            shutil.rmtree(tmp_path / "store")
            shutil.rmtree(parts.parent, ignore_errors=True)
            kills = 0
    subprocess.run([*command, "-o", str(tmp_path / "store"), *options], check=True, stdout=subprocess.DEVNULL)
    # The chunks are smaller here: they do not decide the bytes.
    build(BuildRequest(sources=(str(source),), output=tmp_path / "whole", tokenizer=str(corpus / "tokenizer.json")))
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    check_store(tmp_path / "store")


def test_a_process_that_dies_is_said_and_its_work_done_later(
    corpus: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working, "THREADS", 0)
    others = {process.pid for process in multiprocessing.active_children()}  # the ranks that serve all tests

    def workers() -> list[multiprocessing.Process]:
        return [process for process in multiprocessing.active_children() if process.pid not in others]

    def kill_one(progress: Progress) -> None:
        for worker in workers()[:1]:
            worker.kill()

    with pytest.raises(RankError, match="a worker of the build died; run the same command again to continue"):
        build(request(corpus, tmp_path / "store", workers=2), kill_one)
    assert not workers()
    build(request(corpus, tmp_path / "store"))
    assert contents(tmp_path / "store") == whole


def test_parts_of_another_build_are_not_used(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    other = tmp_path / "corpus"
    shutil.copytree(corpus, other)
    with (other / "corpus.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(Stopped):
        build(request(other, tmp_path / "store"), StopAfter(2))
    with pytest.raises(UserError, match="from other sources or another tokenizer; use --restart"):
        build(request(corpus, tmp_path / "store"))
    build(request(corpus, tmp_path / "store", restart=True))
    assert contents(tmp_path / "store") == whole


def test_a_store_inside_what_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(UserError, match="which is read; use a folder outside it"):
        build(BuildRequest(sources=(str(tmp_path),), output=tmp_path / "deep" / "store"))
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


def test_a_finished_store_is_kept(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    again = build(request(corpus, corpus / "whole"))
    assert again.resumed_tokens == again.tokens
    (tmp_path / "other.txt").write_text("other")
    with pytest.raises(UserError, match="exists already; use another name, or remove it first"):
        build(BuildRequest(sources=(str(tmp_path / "other.txt"),), output=corpus / "whole"))
    assert contents(corpus / "whole") == whole


def test_two_builds_of_one_store_do_not_meet(corpus: Path, tmp_path: Path) -> None:
    def report(progress: Progress) -> None:
        with pytest.raises(UserError, match="is being built by another process"):
            build(request(corpus, tmp_path / "store"))

    build(request(corpus, tmp_path / "store"), report)


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "a"}\n{"text": ""}\n')
    report = build(BuildRequest(sources=(str(tmp_path / "a.jsonl"),), output=tmp_path / "store"))
    assert (report.documents, report.empty_documents, report.tokens) == (1, 2, 2)


def test_an_error_in_the_middle_keeps_what_was_done(corpus: Path, tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_bytes((corpus / "corpus.jsonl").read_bytes() + b"{broken\n")
    with pytest.raises(UserError, match="line 601 is not JSON"):
        build(BuildRequest(sources=(str(source),), output=tmp_path / "store", workers=2))
    assert list((tmp_path / "store.partial" / "parts").glob("*.json"))


def test_a_tokenizer_must_say_what_ends_a_document(corpus: Path, tmp_path: Path) -> None:
    table = json.loads((corpus / "tokenizer.json").read_text().replace("<|endoftext|>", "<|stop|>"))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(table))
    options = {"sources": (str(corpus / "corpus.jsonl"),), "tokenizer": str(path)}
    with pytest.raises(UserError, match=r"use --end-of-document with <\|stop\|>"):
        build(BuildRequest(output=tmp_path / "a", **options))  # type: ignore[arg-type]
    build(BuildRequest(output=tmp_path / "b", end_of_document="<|stop|>", **options))  # type: ignore[arg-type]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|stop|>"}}')
    build(BuildRequest(output=tmp_path / "c", **options))  # type: ignore[arg-type]
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    path.write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer.json"):
        build(BuildRequest(output=tmp_path / "d", **options))  # type: ignore[arg-type]


def test_workers_are_started_for_work_and_not_beyond_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a text")
    started: list[object] = []
    monkeypatch.setattr("cuboid.data.workers._process", lambda *arguments: started.append(arguments))
    build(BuildRequest(sources=(str(tmp_path / "a.txt"),), output=tmp_path / "store", workers=500))
    assert not started, "one chunk is the work of one"
    monkeypatch.setattr("cuboid.data.workers.WORKER_BYTES", 1 << 40)
    with pytest.raises(
        UserError, match=r"workers=9 take at least 1\.1e\+03 GB of memory, and .* use workers=8 or less"
    ):
        build(BuildRequest(sources=(str(tmp_path / "a.txt"),), output=tmp_path / "other", workers=9))
    assert not list(tmp_path.glob("other*"))
