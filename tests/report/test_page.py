"""The page as a file: well-formed, alone, and with no way out of its data for text that came from a run file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.planning.choose import plans
from cuboid.planning.collectives import predicted_ledger
from cuboid.planning.plan import dump_plan
from cuboid.planning.question import Question
from cuboid.probe.rehearsal import rehearse
from cuboid.report.metrics import experts
from cuboid.report.page import SCRIPTS, collect, embedded, page
from cuboid.report.source import SERIES_POINTS, open_source
from cuboid.report.watch import Watched, frame, line
from cuboid.resilience.goodput import Failure
from cuboid.spec.cluster import load_cluster
from cuboid.spec.model import load_model
from cuboid.spec.ranks import groups
from tests.cli.command import environment
from tests.report.cases import make_run, row, write_memory, write_rows


def test_a_run(tmp_path: Path) -> None:
    """Loss, speed, tokens, the step spread and memory, recomputed from the rows."""
    run = make_run(tmp_path)
    save = {"step": 2, "bytes": 5_000_000, "write_seconds": 0.25, "stall_seconds": 0.0, "warning": ""}
    rows = [row(1), row(2, validation_loss=5.5), row(3, checkpoints=[save])]
    write_rows(tmp_path / "metrics.jsonl", rows)
    for rank, peak in enumerate((900, 1100, 1000, 800)):
        write_memory(run, rank, peak)
    data = collect(open_source(tmp_path, "cpux4"), with_search=False)
    json.dumps(data, allow_nan=False)
    measured = data["summary"]["measured"]
    assert (measured["steps"], measured["tokens"]) == (3, 3 * 8 * 16)
    assert (measured["first_loss"], measured["last_loss"]) == (5.9, 5.7)
    assert measured["tokens_per_second"] == pytest.approx(256 / 2.5), "without the first step"
    assert measured["memory_gib"] == 1100 / 2**30
    curves = data["curves"]
    assert curves["steps"] == [1, 2, 3] and curves["each"] == 1
    assert {series["name"]: series["middle"] for series in curves["series"]}["seconds"] == [0.5, 1.0, 1.5]
    assert curves["validation"] == [[2, 5.5]]
    assert curves["events"] == [{"step": 2, "kind": "checkpoint", "text": "checkpoint of step 2: 5.0 MB in 0.25 s"}]
    first, second = data["memory"]["measured"]
    assert (first["rank"], first["peak"], first["least"]) == (1, 1100, 900), "the fullest of those that share a stage"
    assert first["parts"] == {"weights": 100, "gradients": 200, "optimizer": 300, "rest": 500, "buffers": 0}
    assert (second["rank"], second["peak"]) == (2, 1000)
    plan = open_source(tmp_path, "cpux4").plan
    assert plan is not None
    assert [sum(line["parts"].values()) for line in data["memory"]["predicted"]] == pytest.approx(plan.totals, abs=10)


def test_failures_stand_at_the_step_they_came_after(tmp_path: Path) -> None:
    """Steps that were done again have younger rows than the failure."""
    make_run(tmp_path, steps=4)
    times = {1: 1000.0, 2: 1010.0, 3: 1500.0, 4: 1510.0}
    write_rows(tmp_path / "metrics.jsonl", [row(step, time=time) for step, time in times.items()])
    failure = Failure("1970-01-01T00:17:30+00:00", "rank 1 failed: it was ended by SIGKILL", 2, True)
    write_rows(tmp_path / "failures.jsonl", [asdict(failure)])
    (event,) = collect(open_source(tmp_path), False)["curves"]["events"]
    assert (event["step"], event["kind"], event["time"]) == (2, "failure", failure.time)
    assert event["text"] == "rank 1 failed: it was ended by SIGKILL; started again from step 2"


def test_goodput_slow_ranks_warnings_and_bad_steps(tmp_path: Path) -> None:
    """What supervisors and the judge of steps leave in the folder."""
    make_run(tmp_path, "dp=2,pp=2")
    spent = {"steps": 8.0, "set_up": 1.5, "restarts": 0.5, "stopped": 99.0, "until": 123.0}
    slow = {"rank": 1, "because": "data", "seconds": 2.0, "peers": 1.0}
    wrong = [{"kind": "loss", "text": "loss was above its start"}]
    write_rows(tmp_path / "metrics.jsonl", [row(1, warnings=wrong), row(2, goodput=0.8, spent=spent, slowest=slow)])
    ranks = [{"rank": rank, "compute": 1.0, "wait": 0.5 * rank, "data": 0.25, "save": 0.0} for rank in range(4)]
    windows = [{"step": 1, "ranks": []}, {"step": 2, "ranks": [*ranks, {"rank": 7, "compute": 9.0}]}]
    write_rows(tmp_path / "ranks-00000.jsonl", windows)
    write_rows(tmp_path / "bad_steps.jsonl", [{"step": 2, "reason": "loss is not finite", "action": "skip"}])
    with (tmp_path / "bad_steps.jsonl").open("a") as file:
        file.write('{"step": 3, "rea')
    data = collect(open_source(tmp_path, "cpux4"), False)
    assert data["summary"]["goodput"] == {"fraction": 0.8, "spent": {"set_up": 1.5, "restarts": 0.5}}
    told = data["rank_time"]
    assert (told["step"], told["of"], told["slowest"]) == (2, 4, slow), "not rank 7, which an earlier layout had"
    assert [entry["parts"]["wait"] for entry in told["ranks"]] == [0.0, 0.5, 1.0, 1.5]
    warned, event = data["curves"]["events"]
    assert warned == {"step": 1, "kind": "warning", "text": "loss was above its start"}
    assert data["summary"]["warnings"] == ["step 1: loss was above its start"]
    assert event == {"step": 2, "kind": "skipped", "text": "bad step, loss is not finite: skip"}


def test_loads_of_experts(tmp_path: Path) -> None:
    """The newest window always, as many before it as a page has room for, and of all windows the busiest expert."""
    sizes = ("model=tiny-deepseek", "model.mixture.experts=8", "model.mixture.top_k=2", "model.layers=3")
    make_run(tmp_path, "dp=2", 40, *sizes)
    loads = [[[100 * step] + [60] * 6 + [0], [100] * 8] for step in range(1, 5)]
    write_rows(
        tmp_path / "experts.jsonl",
        [{"step": 10 * step, "first": 10 * step - 9, "loads": rows} for step, rows in enumerate(loads, 1)],
    )
    write_rows(tmp_path / "metrics.jsonl", [row(40, routers={"largest_load": [3.5, 1.0], "dead": 2})])
    source = open_source(tmp_path)
    found = collect(source, with_search=False)["experts"]
    assert (found["layers"], found["experts"], found["most"]) == ([1, 2], 8, 4.0), "the first layer has none"
    assert found["busiest"] == [[step, 1.0] for step in (1.0, 2.0, 3.0, 4.0)] and found["idle"] == [[1, 0]] * 4
    assert found["steps"] == [[1, 10], [11, 20], [21, 30], [31, 40]]
    assert [frame["loads"] for frame in found["frames"]] == loads
    assert [frame["step"] for frame in experts(source, numbers=40)["frames"]] == [20, 40]
    watched = Watched.open(tmp_path)
    watched.refresh()
    assert "busiest expert 3.50 × the mean (layer 1)   dead experts 2" in line(watched.state())
    assert "dead experts 2" in frame(watched, 80, 24).plain
    assert collect(open_source(plain_run(tmp_path / "dense")), with_search=False)["experts"] is None


def plain_run(folder: Path) -> Path:
    make_run(folder)
    write_rows(folder / "metrics.jsonl", [row(1)])
    return folder


def test_nothing_here_needs_torch(tmp_path: Path) -> None:
    make_run(tmp_path)
    code = (
        "import sys; from cuboid.cli.main import main; "
        f"status = main(['report', {str(tmp_path)!r}, '--no-search', '-o', {str(tmp_path / 'page.html')!r}]); "
        "sys.exit(status or ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment(), timeout=300).returncode == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_counted_communication_stands_beside_the_prediction(tmp_path: Path) -> None:
    run = make_run(tmp_path, "dp=2,tp=2")
    write_rows(tmp_path / "metrics.jsonl", [row(1)])
    for rank in range(4):
        collectives = predicted_ledger(run, rank).rows()
        write_rows(tmp_path / f"communication-{rank:05d}.jsonl", [{"step": 1, "collectives": collectives}])
    told = collect(open_source(tmp_path, "cpux4"), False)["communication"]
    assert (told["counted_ranks"], told["unforeseen"]) == (4, [])
    tensor = next(line for line in told["lines"] if line["dimension"] == "tp")
    entries = [entry for (kind, _), entry in predicted_ledger(run, 0).entries.items() if kind == "tp"]
    assert tensor["counted"] == tensor["bytes"] == round(sum(entry.sent for entry in entries))
    collectives[0]["bytes"] += 1
    write_rows(tmp_path / "communication-00003.jsonl", [{"step": 1, "collectives": collectives}])
    told = collect(open_source(tmp_path, "cpux4"), False)["communication"]
    assert len(told["unforeseen"]) == 1 and told["unforeseen"][0].startswith("rank 3 ")


@pytest.mark.parametrize("layout", ["dp=2,tp=2,pp=2", "dp=4,cp=2", "dp=4,pp=2,zero=3,shard=2"])
def test_groups_told_by_stride_are_those_of_the_engine(tmp_path: Path, layout: str) -> None:
    run = make_run(tmp_path, layout)
    told = collect(open_source(tmp_path, "cpux8"), False)["ranks"]
    for kind, group in told["groups"].items():
        size, stride = group["size"], group["stride"]
        mine = {
            tuple(first + index * stride for index in range(size))
            for first in (rank - rank // stride % size * stride for rank in range(8))
        }
        assert mine == set(groups(run.layout)[kind])
    assert {line["kind"] for line in told["traffic"]} - {"embedding"} == set(told["groups"])


def test_a_run_of_a_hundred_thousand_steps_is_thinned_and_says_so(tmp_path: Path) -> None:
    make_run(tmp_path, steps=100_000)
    rows = [row(step, loss=6.0, seconds=0.5) for step in range(1, 100_001)]
    rows[54_321]["loss"] = 99.0
    write_rows(tmp_path / "metrics.jsonl", rows)
    data = collect(open_source(tmp_path), False)
    curves = data["curves"]
    assert curves["rows"] == 100_000 and curves["each"] == 67 and len(curves["steps"]) <= SERIES_POINTS
    loss = curves["series"][0]
    assert set(loss["middle"]) == {6.0} and max(loss["high"]) == 99.0, "no peak is lost"
    assert len(page(data)) < 1_000_000


def test_runs_that_hardly_began(tmp_path: Path) -> None:
    """Killed before its first step, or with the last row torn, or with numbers that are none: a page all the same."""
    make_run(tmp_path, steps=3)
    data = collect(open_source(tmp_path), False)
    assert data["kind"] == "run" and data["curves"] is None and data["summary"]["measured"] is None
    assert "<html" in page(data)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1, loss=None, gradient_norm=None, finite=False)) + '\n{"st')
    (tmp_path / "timing-00000.jsonl").write_text('{"step": 1, "act')
    (tmp_path / "communication-00000.jsonl").write_text("")
    data = collect(open_source(tmp_path), False)
    assert data["summary"]["measured"]["last_loss"] is None
    assert data["curves"]["events"][0]["kind"] == "skipped"
    assert "<html" in page(data)


def test_a_plan(tmp_path: Path) -> None:
    """The chosen layout is among the points, the fastest that fit are drawn, and the parts of each add up."""
    question = Question(model=load_model("llama3-8b"), cluster=load_cluster("h100x64"), global_batch=512, sequence=2048)
    best = plans(question)[0]
    (tmp_path / "plan.toml").write_text(dump_plan(best))
    data = collect(open_source(tmp_path / "plan.toml"))
    assert data["kind"] == "plan" and data["curves"] is None
    assert data["summary"]["predicted"]["step_seconds"] == pytest.approx(best.seconds)
    found = data["considered"]
    assert found["own"]["layout"] == str(best.layout)
    for point in found["points"]:
        assert sum(point["parts"]) == pytest.approx(point["seconds"], rel=1e-3)
        assert point["fits"] == (point["memory"] <= found["limit"])
    assert min(point["seconds"] for point in found["points"] if point["fits"]) <= best.seconds * 1.05
    assert len(page(data)) < 1_000_000


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; name the folder of a run, or a plan file"):
        open_source(tmp_path / "none")
    with pytest.raises(UserError, match=r"holds no run\.toml; name the folder of a run"):
        open_source(tmp_path)
    (tmp_path / "plain.toml").write_text('model = "tiny-llama"\n')
    with pytest.raises(UserError, match=r"has no \[plan\] section; add --cluster h100x64"):
        open_source(tmp_path / "plain.toml")
    assert open_source(tmp_path / "plain.toml", "cpux1").plan is not None


def test_a_probe_of_the_machine_is_what_a_report_predicts_from(tmp_path: Path) -> None:
    """Steps of this very run, here and now; what the planner says of other layouts moves with it."""
    run = make_run(tmp_path, "dp=2")
    write_rows(tmp_path / "metrics.jsonl", [row(1), row(2), row(3)])
    assumed = collect(open_source(tmp_path), with_search=False)["summary"]["predicted"]
    assert any("--probe" in text for text in assumed["warnings"])
    seconds = rehearse(run, tmp_path)
    probed = collect(open_source(tmp_path), with_search=False)["summary"]
    assert probed["predicted"]["step_seconds"] == pytest.approx(seconds)
    assert probed["cluster"]["probed"] and not probed["predicted"]["warnings"]
    assert probed["predicted"]["memory_gib"] == assumed["memory_gib"]
    factor = seconds / assumed["step_seconds"]
    assert probed["predicted"]["parts"]["compute"] == pytest.approx(factor * assumed["parts"]["compute"])
    named = collect(open_source(tmp_path, "cpux2"), with_search=False)["summary"]
    assert named["predicted"]["step_seconds"] == assumed["step_seconds"], "who names a cluster means it"


def test_what_cannot_be_probed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "dp=2")
    write_rows(tmp_path / "run" / "metrics.jsonl", [row(1)])
    assert main(["report", str(tmp_path / "run"), "--probe", "--cluster", "cpux2"]) == 2
    assert "probe=true measures this machine for a run that was trained, and cluster=cpux2" in capsys.readouterr().err
    broken = replace(run, data=replace(run.data, source="nowhere.txt"))
    with pytest.raises(UserError, match="needs steps of dp=2,tp=1,pp=1 on this machine, which failed"):
        rehearse(broken, tmp_path / "run")


EVIL = '</script><script>alert(1)</script><!-- @@DATA@@ & " \u2028'


class Reader(HTMLParser):
    """Which elements there are, how they nest, and what the data element holds."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "path"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def test_the_page_holds_the_data_and_asks_for_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [row(1), row(2)])
    data = collect(open_source(tmp_path), False)
    text = page(data)
    reader = read(text)
    assert json.loads(reader.scripts[0]) == data and len(reader.scripts) == 2
    addresses = [value for _, found in reader.seen for name in ("src", "href", "action") if (value := found.get(name))]
    assert addresses == ["data:,", "#main"]
    policy = next(found["content"] for tag, found in reader.seen if found.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'") and "connect-src" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), "text stays text"
    assert "@@" not in text


def test_every_script_is_there_and_every_section_is_drawn_by_one_of_them() -> None:
    folder = resources.files("cuboid.report") / "page"
    names = {entry.name.removesuffix(".js") for entry in folder.iterdir() if entry.name.endswith(".js")}
    assert names == {*SCRIPTS, "live"}
    script = "".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    for name in re.findall(r"\bdraw[A-Z]\w*", script):
        assert re.search(rf"function {name}\(|const {name} =", script), f"{name} is called and not defined"


def test_no_text_of_a_run_breaks_out(tmp_path: Path) -> None:
    make_run(tmp_path / "runs</script>")
    failure = {"time": EVIL, "reason": EVIL, "checkpoint": 0, "restarted": False}
    write_rows(tmp_path / "runs</script>" / "failures.jsonl", [failure])
    write_rows(tmp_path / "runs</script>" / "metrics.jsonl", [row(1)])
    data = {**collect(open_source(tmp_path / "runs</script>"), False), "title": EVIL}
    reader = read(page(data))
    assert len(reader.scripts) == 2 and json.loads(reader.scripts[0]) == data
    assert data["curves"]["events"][0]["text"].startswith(EVIL)
    assert "<" not in embedded(data)
