"""Published rows as cases: what they print, what their names imply, what they lack, what is malformed."""

import pytest

from cuboid.cost.published import understand
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
