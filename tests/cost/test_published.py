"""Published rows as cases: what they print, what their names imply, what they lack, what is malformed."""

import csv
import json
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.cost.published import ANSWERS, answer_rows, read_rows, understand, write_answers
from cuboid.errors import UserError
from cuboid.spec.layout import SCHEDULES

ROW = {
    "id": "test-0001",
    "source": "somewhere",
    "year": "2024",
    "model": "llama3-8b",
    "hidden": "4096",
    "layers": "32",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "gpu": "H100-80G",
    "gpus": "16",
    "gpus_per_node": "8",
    "tp": "2",
    "pp": "2",
    "vpp": "",
    "cp": "",
    "ep": "",
    "dp": "4",
    "zero": "1",
    "mbs": "1",
    "gbs": "128",
    "seq": "8192",
    "precision": "bf16",
    "recompute": "none",
    "seqpar": "yes",
    "engine": "megatron",
    "notes": "",
}


def row(**changes: str) -> dict[str, str]:
    return {**ROW, **changes}


def lacks(**changes: str) -> str:
    with pytest.raises(LookupError) as caught:
        understand(row(**changes))
    return str(caught.value.args[0])


def test_a_full_row_is_taken_as_printed() -> None:
    case = understand(ROW)
    assert (case.chip, case.fabric, case.engine, case.precision) == ("h100-80g", "h100", "megatron", "bf16")
    assert (case.job["dp"], case.job["tp"], case.job["pp"], case.job["cp"]) == (4, 2, 2, 1)
    assert (case.job["zero"], case.job["shard"], case.job["sequence_parallel"]) == (1, 4, 1)
    assert (case.shape["gated"], case.shape["ffn"], case.shape["experts"]) == (1, 14336, 0)


@pytest.mark.parametrize(
    ("text", "chip", "fabric"),
    [
        ("A100", "a100-80g", "a100"),
        ("A100-80G-SXM4", "a100-80g", "a100"),
        ("A100-80G (NDm A100 v4)", "a100-80g", "a100"),
        ("A100-40G", "a100-40g", "a100"),
        ("A800-80G", "a800-80g", "a100"),
        ("H100-96G-500W HBM2e", "h100-96g", "h100"),
        ("H100-95G HBM2e", "h100-96g", "h100"),
        ("H200", "h200", "h100"),
        ("H800", "h800", "h100"),
        ("B200 (power limited)", "b200", "b200"),
        ("Blackwell 184GiB", "b200", "b200"),
        ("GB200", "gb200", "nvl72"),
        ("GB300", "gb300", "nvl72"),
        ("MI300X", "mi300x", "mi300x"),
        ("MI355", "mi355x", "mi300x"),
        ("V100-32G (DGX-2)", "v100-32g", "v100"),
        ("V100-16G (p3.16)", "v100-16g", "v100"),
        ("TPU-v5p", "tpu-v5p", "tpu"),
    ],
)
def test_gpu_names_are_read_as_people_write_them(text: str, chip: str, fabric: str) -> None:
    case = understand(row(gpu=text))
    assert (case.chip, case.fabric) == (chip, fabric)


@pytest.mark.parametrize(
    ("text", "stage", "shard"),
    [
        ("0", 0, 4),
        ("3", 3, 4),
        ("FSDP2", 3, 4),
        ("HSDP", 3, 4),
        ("1 (shard group 2)", 1, 2),
        ("1 (shard group -1)", 1, 4),
        ("2 (Pos+g) + Megatron MP", 2, 4),
        ("3+CPU offload", 3, 4),
        ("Gemini (3)", 3, 4),
    ],
)
def test_zero_is_read_with_its_shard_group(text: str, stage: float, shard: float) -> None:
    job = understand(row(zero=text)).job
    assert (job["zero"], job["shard"]) == (stage, shard)
    assert job["offload"] == float("offload" in text)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("", "bf16"),
        ("fp16", "bf16"),
        ("amp_bf16", "bf16"),
        ("fp8-mx 32x32", "fp8"),
        ("mxfp8_cublas", "fp8"),
        ("nvfp4 (bf16 tail)", "fp4"),
        ("fp32", "float32"),
    ],
)
def test_precisions_fall_into_four_kinds(text: str, precision: str) -> None:
    assert understand(row(precision=text)).precision == precision


@pytest.mark.parametrize(
    ("text", "level"), [("full", 2), ("full(layer)", 2), ("selective(op)", 1), ("core_attn+layernorm", 1), ("none", 0)]
)
def test_recomputation_has_three_levels(text: str, level: float) -> None:
    assert understand(row(recompute=text)).job["recompute"] == level


@pytest.mark.parametrize(
    ("changes", "name", "chunks", "held"),
    [
        ({"vpp": "4"}, "interleaved", 4, 1),
        ({"vpp": "max (1 layer per chunk)"}, "interleaved", 16, 1),
        ({"notes": "exact; schedule ZB-1p; 24 microbatches"}, "zb1p", 1, 1),
        ({"notes": "exact; schedule ZB-2p; 24 microbatches"}, "zbv", 2, 2),
        ({"notes": "exact; schedule 1F1B; 24 microbatches"}, "1f1b", 1, 1),
        ({"pp": "1", "dp": "8", "vpp": "4"}, "1f1b", 1, 1),
    ],
)
def test_schedules_come_from_columns_and_notes(changes: dict[str, str], name: str, chunks: float, held: float) -> None:
    job = understand(row(**changes)).job
    assert (SCHEDULES[int(job["schedule"])], job["vpp"], job["held"]) == (name, chunks, held)


def test_nemo_recipes_interleave_where_they_do_not_say() -> None:
    assert understand(row(engine="nemo")).job["vpp"] == 16


def test_names_fill_in_what_a_row_does_not_print() -> None:
    bare = {"hidden": "", "layers": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": ""}
    shape = understand(row(model="LLAMA3_70B", **bare)).shape
    assert (shape["hidden"], shape["layers"], shape["kv_heads"], shape["vocab"]) == (8192, 80, 8, 128256)
    assert understand(row(model="GPT-39.1B", vocab="", ffn="")).shape["gated"] == 0
    assert understand(row(model="GPT h1024 L12", vocab="", ffn="")).shape["ffn"] == 4 * 4096


def test_mixtures_and_latent_attention_come_from_the_name() -> None:
    shape = understand(row(model="DeepSeekV3", moe_experts="256", moe_topk="8", ffn="18432", ep="4")).shape
    assert (shape["experts"], shape["expert_ffn"], shape["shared_ffn"], shape["dense_layers"]) == (256, 2048, 2048, 3)
    assert (shape["ffn"], shape["latent"], shape["kv_rank"]) == (18432, 1, 512)
    other = understand(row(model="Some-MoE", moe_experts="16", moe_topk="2", ffn="1024")).shape
    assert (other["experts"], other["expert_ffn"], other["dense_layers"]) == (16, 1024, 0)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"tp": "", "pp": ""}, "tp, pp"),
        ({"mbs": ""}, "mbs"),
        ({"gbs": "", "seq": ""}, "gbs, seq"),
        ({"gpu": ""}, "gpu"),
        ({"gpu": "Gaudi3"}, "calibration for gpu Gaudi3"),
        ({"model": "unheard-of", "hidden": "", "vocab": ""}, "hidden, vocab"),
        ({"gpus": "32"}, "a layout that makes 32 gpus"),
        ({"notes": "LoRA on all linears"}, "full training (LoRA freezes most weights)"),
    ],
)
def test_a_row_that_lacks_something_says_what(changes: dict[str, str], missing: str) -> None:
    assert lacks(**changes) == missing


@pytest.mark.parametrize(
    "changes",
    [
        {"mbs": "one"},
        {"tp": "2x"},
        {"gbs": "-8"},
        {"seq": "8k"},
        {"seq": "nan"},
        {"hidden": "1e400"},
        {"layers": "1e9"},
    ],
)
def test_malformed_numbers_are_refused_by_name(changes: dict[str, str]) -> None:
    with pytest.raises(UserError, match=next(iter(changes))):
        understand(row(**changes))


def test_dp_follows_from_the_number_of_gpus() -> None:
    assert understand(row(dp="")).job["dp"] == 4


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({"year": "2021"}, "megatron-2021"),
        ({"gpu": "A100"}, "megatron-2021"),
        ({"year": "2021", "zero": "3"}, "zero3-2021"),
        ({"notes": "distributed optimizer, no comm overlap"}, "megatron-serial"),
        ({"source": "Zero Bubble PP (arXiv 2401.10241)"}, "megatron-zero-bubble"),
        ({"engine": "megatron-bridge"}, "megatron-bridge"),
        ({"engine": "megatron-bridge", "source": "x: 26.08 NeMo Container"}, "megatron-bridge-26.08"),
        ({"engine": "nemo", "model": "llama3-70b (MaxText)"}, "maxtext"),
        ({"engine": "homemade", "zero": "FSDP"}, "fsdp"),
        ({"engine": "homemade"}, "megatron"),
        ({"engine": "", "tp": "1", "pp": "1", "dp": "16"}, "fsdp"),
        ({"engine": "nanotron"}, "nanotron"),
        ({"engine": "megatron-deepspeed", "gpu": "V100-32G"}, "megatron-deepspeed@v100"),
        ({"engine": "nemo", "gpu": "A100"}, "nemo@a100"),
    ],
)
def test_engines_are_told_apart_by_name_age_and_notes(changes: dict[str, str], engine: str) -> None:
    assert understand(row(**changes)).engine == engine


@pytest.mark.parametrize(
    ("source", "gpu", "fabric"),
    [
        ("VIA-Research/vTrain data/ground_truth_multi.csv", "A100", "vtrain"),
        ("bigscience-workshop/bigscience train/tr11", "A100-80G", "jean-zay-a100"),
        ("bigscience-workshop/bigscience experiments", "V100-32G", "jean-zay-v100"),
        ("Narayanan 2021 via bigscience jz/frameworks", "A100-80G", "a100"),
        ("Ultra-Scale Playbook interactive benchmark (nanotron)", "H100-80G", "playbook"),
        ("mosaicml/llm-foundry scripts", "A100-40G", "mosaic-a100"),
        ("mosaicml/llm-foundry scripts", "H100-80G", "h100"),
    ],
)
def test_clusters_are_known_by_their_source(source: str, gpu: str, fabric: str) -> None:
    assert understand(row(source=source, gpu=gpu)).fabric == fabric


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
