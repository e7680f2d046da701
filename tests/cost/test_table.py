"""`cuboid estimate`: every row answered or told why not, in the same order, and the file it writes."""

import csv
import json
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.cost.published import ANSWERS, answer_rows, read_rows, write_answers
from cuboid.errors import UserError

COLUMNS = "id,source,year,model,hidden,layers,heads,gpu,gpus,tp,pp,dp,mbs,gbs,seq,recompute,engine,mem_gb".split(",")
GOOD = "a,x,2024,llama3-8b,4096,32,32,H100-80G,8,1,1,8,1,64,8192,none,torchtitan,".split(",")


def table(folder: Path, *rows: list[str]) -> Path:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def changed(**values: str) -> list[str]:
    return [values.get(name, value) for name, value in zip(COLUMNS, GOOD, strict=True)]


def written(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_come_back_in_order_with_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(tmp_path, GOOD, changed(id="b", mbs=""), changed(id="c", gpu="A100"), changed(id="d", gbs="x"))
    out = tmp_path / "out.csv"
    assert main(["estimate", "--rows", str(rows), "-o", str(out)]) == 0
    printed = capsys.readouterr()
    assert "2 of 4 rows estimated, 2 skipped" in printed.out
    assert "line 5: gbs=x is not a number" in printed.err
    answers = written(out)
    assert [answer["id"] for answer in answers] == ["a", "b", "c", "d"]
    assert [name for name in answers[0] if name not in COLUMNS] == list(ANSWERS)
    assert answers[1]["skipped"] == "lacks mbs"
    assert answers[3]["skipped"].startswith("line 5: ")
    assert answers[1]["pred_step_s"] == ""
    assert float(answers[0]["pred_step_s"]) > 0
    assert float(answers[2]["pred_step_s"]) > float(answers[0]["pred_step_s"])
    assert answers[0]["pred_fits"] in ("true", "false")
    tokens = 64 * 8192 / float(answers[0]["pred_step_s"]) / 8
    assert float(answers[0]["pred_tok_s_gpu"]) == pytest.approx(tokens, rel=1e-4)


def test_a_row_with_too_many_values_is_named_and_the_others_answered(tmp_path: Path) -> None:
    path = table(tmp_path, [*GOOD, "surplus"], GOOD)
    columns, rows = read_rows(path)
    answers = answer_rows(rows)
    assert answers[0].skipped.startswith("line 2: ")
    assert not answers[1].skipped
    write_answers(tmp_path / "out.csv", columns, rows, answers)
    assert len(written(tmp_path / "out.csv")) == 2


def test_a_short_row_lacks_what_it_leaves_out(tmp_path: Path) -> None:
    _, rows = read_rows(table(tmp_path, GOOD[:9], GOOD))
    answers = answer_rows(rows)
    assert answers[0].skipped == "lacks tp, pp, dp, mbs, gbs, seq"
    assert not answers[1].skipped


def test_answering_twice_changes_nothing(tmp_path: Path) -> None:
    rows = table(tmp_path, GOOD)
    once, twice = tmp_path / "once.csv", tmp_path / "twice.csv"
    main(["estimate", "--rows", str(rows), "-o", str(once)])
    main(["estimate", "--rows", str(once), "-o", str(twice)])
    assert once.read_text() == twice.read_text()


def test_json_has_one_entry_per_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--rows", str(table(tmp_path, GOOD, changed(seq=""))), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert set(first) == {"pred_step_s", "pred_tok_s_gpu", "pred_mem_gb", "pred_fits"}
    assert second == {"skipped": "lacks seq"}


def test_files_that_cannot_be_read_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--rows", str(tmp_path / "none.csv")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no column gpu, tp, pp, seq"):
        read_rows(other)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00gpu")
    with pytest.raises(UserError, match="UTF-8"):
        read_rows(binary)


def test_an_unknown_engine_is_answered_like_its_nearest_kin(tmp_path: Path) -> None:
    _, rows = read_rows(table(tmp_path, changed(engine="homemade")))
    assert answer_rows(rows)[0].seconds > 0


def test_an_empty_table_has_no_answers(tmp_path: Path) -> None:
    _, rows = read_rows(table(tmp_path))
    assert answer_rows(rows) == []
