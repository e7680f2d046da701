"""Estimates for a table of published runs: every row answered, or told what it lacks."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from cuboid.cost.constants import Fabric, chip_named, default_fabric, engine_for, engine_named, fabric_named, tables
from cuboid.cost.estimate import GIB, Machine, estimate_shapes, wired
from cuboid.cost.inputs import Jobs, Shape
from cuboid.errors import UserError
from cuboid.outputs import write_output
from cuboid.readers import Unreadable, parse_toml, read_text
from cuboid.spec.cluster import accelerator_table, load_cluster
from cuboid.spec.layout import RECOMPUTE, SCHEDULES

# Published runs as jobs of the cost model: reads the columns of `runs.csv`, and says what a row lacks.
#
# A row that cannot be estimated has a reason instead of numbers; a malformed value is named with its line.


Row = Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """One row, understood."""

    shape: dict[str, float]
    job: dict[str, float]
    chip: str
    fabric: str
    engine: str
    precision: str


def _text(row: Row, name: str) -> str:
    return (row.get(name) or "").strip()


def _number(row: Row, name: str) -> float | None:
    """The number of a column, None where it is empty; the first number of a text such as `1 (shard group 8)`."""
    text = _text(row, name)
    if not text:
        return None
    found = re.match(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", text)
    if not found or (found.end() < len(text) and text[found.end()] not in " (+,;"):
        raise UserError(f"{name}={text} is not a number; write it like {name}=8")
    value = float(found.group())
    if value < 0:
        raise UserError(f"{name}={text} is negative; use {name}=0 or more")
    largest = LARGEST.get(name, 1e12)
    if value > largest:
        raise UserError(f"{name}={text} is beyond any run; use {name}={largest:.0f} or less")
    return value


LARGEST = {"layers": 10_000, "tp": 1e6, "pp": 1e6, "cp": 1e6, "ep": 1e6, "dp": 1e7, "vpp": 10_000, "gpus": 1e8}
"""Column -> the largest number that is taken for what it says."""


@cache
def _families() -> tuple[tuple[re.Pattern[str], dict[str, float]], ...]:
    text = resources.files("cuboid.cost").joinpath("data", "families.toml").read_text(encoding="utf-8")
    return tuple((re.compile(item["pattern"]), item["set"]) for item in parse_toml(text)["family"])


def _family(name: str) -> dict[str, float]:
    lowered = name.lower().replace("_", "-")
    return next((values for pattern, values in _families() if pattern.search(lowered)), {})


def _shape(row: Row) -> dict[str, float]:
    """The model's shape: what the row prints, and from its name what the row omits."""
    known = _family(_text(row, "model"))
    columns = {"hidden": "hidden", "layers": "layers", "heads": "heads", "kv_heads": "kv_heads", "vocab": "vocab"}
    values: dict[str, float] = {}
    for key, column in columns.items():
        printed = _number(row, column)
        values[key] = printed if printed else known.get(key, 0.0)
    missing = [key for key in ("hidden", "layers", "heads", "vocab") if not values[key]]
    if missing:
        raise LookupError(", ".join(missing))
    values["kv_heads"] = values["kv_heads"] or values["heads"]
    values["head_dim"] = known.get("head_dim", values["hidden"] / values["heads"])
    values["gated"] = known.get("gated", 1.0)
    values["tied"] = known.get("tied", 0.0)
    values["qk_norm"] = known.get("qk_norm", 0.0)
    values["positions"] = 0.0 if values["gated"] else 2048.0
    for key in ("layernorm", "qkv_bias", "output_bias", "mlp_bias"):
        values[key] = 1.0 - values["gated"]  # as the GPT models have them
    values["router_bias"] = 0.0
    printed = _number(row, "ffn")
    experts = _number(row, "moe_experts") or known.get("experts", 0.0)
    values["experts"] = experts
    values["top_k"] = (_number(row, "moe_topk") or known.get("top_k", 1.0)) if experts else 0.0
    values["expert_ffn"] = (known.get("expert_ffn") or printed or 0.0) if experts else 0.0
    values["shared_ffn"] = known.get("shared_ffn", 0.0) if experts else 0.0
    values["dense_layers"] = min(known.get("dense_layers", 0.0), values["layers"]) if experts else values["layers"]
    values["ffn"] = known.get("ffn", printed or 0.0) if experts else (printed or known.get("ffn", 0.0))
    if not values["ffn"]:
        # Gated blocks of this age are two thirds as wide, so that the parameter count stays 8 h².
        values["ffn"] = values["hidden"] * (8 / 3 if values["gated"] else 4)
    for key in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim"):
        values[key] = known.get(key, 0.0)
    values["latent"] = float(values["kv_rank"] > 0)
    return values


CHIPS = (
    ("gb300", "gb300"),
    ("gb200", "gb200"),
    ("b300", "b300"),
    ("b200", "b200"),
    ("blackwell", "b200"),
    ("h200", "h200"),
    ("h800", "h800"),
    ("h100-9", "h100-96g"),
    ("hbm2e", "h100-96g"),
    ("h100", "h100-80g"),
    ("a800", "a800-80g"),
    ("a100-40", "a100-40g"),
    ("a100-pcie-40", "a100-40g"),
    ("a100", "a100-80g"),
    ("v100-16", "v100-16g"),
    ("v100", "v100-32g"),
    ("mi355", "mi355x"),
    ("mi300", "mi300x"),
    ("v5p", "tpu-v5p"),
    ("v5e", "tpu-v5e"),
    ("v6e", "tpu-v6e"),
    ("tpu-v4", "tpu-v4"),
)
"""Part of a `gpu` column -> chip; the first that is found wins."""


def _chip(row: Row) -> str:
    text = _text(row, "gpu").lower().replace(" ", "-")
    if not text:
        raise LookupError("gpu")
    found = next((chip for part, chip in CHIPS if part in text), None)
    if found is None:
        raise LookupError(f"calibration for gpu {_text(row, 'gpu')}")
    return found


FABRICS = (
    ("vtrain", "", "vtrain"),
    ("bigscience-workshop", "a100", "jean-zay-a100"),
    ("bigscience-workshop", "v100", "jean-zay-v100"),
    ("ultra-scale playbook", "", "playbook"),
    ("nanotron", "h100", "playbook"),
    ("internevo", "a", "roce-a100"),
    ("llm-foundry", "a100", "mosaic-a100"),
)
"""Part of the source, part of the chip -> the cluster it was run on."""


def _fabric(row: Row, chip: str) -> str:
    source = _text(row, "source").lower()
    for part, kind, fabric in FABRICS:
        if part in source and chip.startswith(kind):
            return fabric
    return default_fabric(chip)


def _engine(row: Row, chip: str) -> str:
    """The profile of the program that ran the row, where need be of its age."""
    engine = _text(row, "engine").lower()
    alone = _text(row, "tp") in ("", "1", "1.0") and _text(row, "pp") in ("", "1", "1.0")
    source, notes = _text(row, "source").lower(), _text(row, "notes").lower()
    year = _number(row, "year") or 2024
    whole = _text(row, "zero").lower().startswith(("3", "fsdp", "hsdp"))
    if re.search(r"maxtext|paxml", _text(row, "model").lower()):
        return "maxtext"
    if engine in ("megatron", "deepspeed", "megatron-deepspeed") and year <= 2021 and whole:
        return "megatron-deepspeed-zero3" if engine == "megatron-deepspeed" else "zero3-2021"
    release = re.search(r"\b(2[5-9])\.(\d\d)(\.\d\d)? nemo container", source)
    # Its experts became faster in 26.06 on racks of 72, whose rows equal those of 26.08, and in 26.08 elsewhere.
    faster = (26, 6) if chip.startswith("gb") else (26, 8)
    if engine == "megatron-bridge" and release and (int(release[1]), int(release[2])) >= faster:
        return "megatron-bridge-26.08"
    if engine not in tables()["engines"]:
        engine = "fsdp" if whole or alone else "megatron"
    if engine != "megatron":
        return f"{engine}-overlap" if OVERLAP.search(notes) else engine
    if "zero bubble" in source:
        return "megatron-zero-bubble"
    if "no comm overlap" in notes:
        return "megatron-serial"
    if OVERLAP.search(notes):
        return "megatron-overlap"
    # Megatron-LM on Ampere and before: MegaScale's rows of 2024 run as those of 2021 do.
    return "megatron-2021" if year < 2023 or chip.startswith(("v100", "a100", "a800")) else "megatron"


OVERLAP = re.compile(r"1f1b overlap|ep overlap on")
"""Notes of runs whose expert traffic went behind the compute of another micro-batch."""


def _precision(row: Row, chip: str) -> str:
    text = _text(row, "precision").lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text:
        return "fp8"
    return "float32" if text in ("fp32", "float32", "tf32") else "bf16"


def _zero(row: Row, dp: float, node: float) -> tuple[float, float]:
    """ZeRO stage and how many ranks it splits over."""
    text = _text(row, "zero").lower()
    engine = _text(row, "engine").lower()
    if not text:
        modern = engine == "megatron" and (_number(row, "year") or 2024) >= 2023
        sharded = modern or engine in ("nemo", "megatron-bridge", "nanotron") or "bigscience" in _text(row, "source")
        default = 1.0 if sharded else 0.0
        return (3.0 if engine in ("fsdp", "torchtitan") else default), dp
    if "hsdp" in text:
        return 3.0, min(node, dp)
    if "fsdp" in text:
        return 3.0, dp
    digit = re.search(r"[0-3]", text)
    group = re.search(r"shard group (\d+)", text)
    return float(digit.group()) if digit else 1.0, min(float(group.group(1)), dp) if group else dp


def _recompute(row: Row) -> float:
    text = _text(row, "recompute").lower() or ("selective" if _text(row, "engine") == "torchtitan" else "")
    if text.startswith("full"):
        return float(RECOMPUTE.index("full"))
    return float(RECOMPUTE.index("none" if text in ("", "none", "no") else "selective"))


def _schedule(row: Row, layers: float, pp: float) -> tuple[float, float]:
    """Schedule and stages per rank, from the columns and from what the notes say of the schedule."""
    text = _text(row, "vpp")
    chunks = layers / pp if text.startswith("max") else (_number(row, "vpp") or 1.0)
    if not text and _text(row, "engine") == "nemo" and layers % pp == 0:
        # Its recipes interleave down to one layer per chunk where they do not print another number.
        chunks = layers / pp
    notes = _text(row, "notes").lower()
    name = "interleaved" if chunks > 1 and pp > 1 else "1f1b"
    if pp > 1 and re.search(r"schedule zb-?1p|zbh1|zb-?h1|schedule zbb", notes):
        name, chunks = "zb1p", 1.0
    elif pp > 1 and "schedule dualpipe" in notes:
        name, chunks = "dualpipev", 2.0
    elif pp > 1 and re.search(r"schedule zb-?2p|schedule zbv|zb-v|schedule v-(half|min)", notes):
        name, chunks = "zbv", 2.0
    return float(SCHEDULES.index(name)), chunks if pp > 1 else 1.0


def _held(notes: str) -> float:
    """Memory variants of zero-bubble schedules, which a layout has no names for."""
    factors = {"zb-2p": 2.0, "zb2p": 2.0, "v-half": 0.5, "v-min": 0.34}
    return next((factor for name, factor in factors.items() if f"schedule {name}" in notes), 1.0)


def _job(row: Row, layers: float) -> dict[str, float]:
    """The layout and the batch of a row."""
    values = {name: _number(row, name) for name in ("gpus", "tp", "pp", "cp", "ep", "dp", "mbs", "gbs", "seq")}
    tp, pp, cp = values["tp"] or 0.0, values["pp"] or 0.0, values["cp"] or 1.0
    missing = [name for name, value in (("tp", tp), ("pp", pp)) if not value]
    dp = values["dp"] or (values["gpus"] / (tp * pp * cp) if values["gpus"] and tp and pp else 0.0)
    micro, batch = values["mbs"], values["gbs"]
    if not dp:
        missing.append("dp")
    missing += [name for name, value in (("mbs", micro), ("gbs", batch), ("seq", values["seq"])) if not value]
    if missing or not micro or not batch:
        raise LookupError(", ".join(missing))
    node = _number(row, "gpus_per_node") or 8.0
    zero, shard = _zero(row, dp, node)
    schedule, chunks = _schedule(row, layers, pp)
    sequence_parallel = _text(row, "seqpar").lower()
    parallel = sequence_parallel in ("yes", "1", "true") or (
        not sequence_parallel and _text(row, "engine") in ("nemo", "megatron-bridge", "torchtitan", "nanotron")
    )
    return {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": values["ep"] or 1.0,
        "zero": zero,
        "shard": shard,
        "schedule": schedule,
        "vpp": chunks,
        "micro_batch": micro,
        "recompute": _recompute(row),
        "sequence_parallel": float(parallel and tp > 1),
        "global_batch": batch,
        "sequence": values["seq"] or 0.0,
        "offload": float("offload" in _text(row, "zero").lower()),
        "held": _held(_text(row, "notes").lower()) if pp > 1 else 1.0,
    }


def understand(row: Row) -> Case:
    """The row as a case; LookupError names what it lacks, UserError what is malformed."""
    if re.search(r"\blora\b", (_text(row, "notes") + _text(row, "model")).lower()):
        raise LookupError("full training (LoRA freezes most weights)")
    chip = _chip(row)
    shape = _shape(row)
    job = _job(row, shape["layers"])
    gpus = _number(row, "gpus")
    if gpus and abs(job["dp"] * job["tp"] * job["pp"] * job["cp"] - gpus) > 0.5:
        raise LookupError(f"a layout that makes {gpus:.0f} gpus")
    engine = engine_for(_engine(row, chip), chip_named(chip)).name
    return Case(shape, job, chip, _fabric(row, chip), engine, _precision(row, chip))


ANSWERS = ("pred_step_s", "pred_tok_s_gpu", "pred_mem_gb", "pred_fits", "skipped")


@dataclass(frozen=True)
class Answer:
    """What the cost model says of one row."""

    seconds: float = 0.0
    tokens: float = 0.0
    memory: float = 0.0
    """GiB."""
    fits: bool = False
    skipped: str = ""
    """What the row lacks; empty where it was estimated."""
    case: Case | None = None


def answer_rows(rows: Sequence[Row | UserError], first_line: int = 2) -> list[Answer]:
    """One answer per row, in order; a row may already be an error of the reader."""
    answers: list[Answer] = []
    for line, row in enumerate(rows, first_line):
        try:
            if isinstance(row, UserError):
                raise row
            answers.append(Answer(case=understand(row)))
        except LookupError as error:
            answers.append(Answer(skipped=f"lacks {error.args[0]}"))
        except UserError as error:
            answers.append(Answer(skipped=f"line {line}: {error}"))
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for index, answer in enumerate(answers):
        if answer.case:
            case = answer.case
            groups.setdefault((case.chip, case.fabric, case.engine, case.precision), []).append(index)
    for members in groups.values():
        cases = [answers[index].case for index in members]
        for index, answer in zip(members, answer_cases([case for case in cases if case]), strict=True):
            answers[index] = answer
    return answers


def stack(cases: Sequence[Case]) -> tuple[Shape, Jobs]:
    """Shapes and jobs of several cases, one entry per case."""
    shape = Shape.make(**{key: [case.shape[key] for case in cases] for key in cases[0].shape})
    return shape, Jobs.make(**{key: [case.job[key] for case in cases] for key in cases[0].job})


def answer_cases(cases: Sequence[Case]) -> list[Answer]:
    """Answers for cases of one accelerator, fabric, engine and precision."""
    first = cases[0]
    machine = Machine(chip_named(first.chip), links_of(first.chip, first.fabric, fabric_named(first.fabric)))
    result = estimate_shapes(*stack(cases), machine, engine_named(first.engine), first.precision)
    columns = np.broadcast_arrays(result.seconds, result.tokens, result.memory / GIB, result.fits)
    return [
        Answer(float(seconds), float(tokens), float(memory), bool(fits), "", case)
        for seconds, tokens, memory, fits, case in zip(*columns, cases, strict=True)
    ]


def links_of(chip: str, name: str, fabric: Fabric) -> Fabric:
    """A named fabric under a chip: as it is where rows say which cluster they ran on, else with the chip's links."""
    if name != default_fabric(chip):
        return fabric
    per_node = accelerator_table(chip)["accelerators_per_node"] or 8
    return wired(fabric, load_cluster(f"{chip}x{per_node * 100_000}"))


def read_rows(path: Path) -> tuple[list[str], list[Row | UserError]]:
    """Columns and rows of a CSV file; a row with more values than columns becomes an error in its place."""
    try:
        reader = csv.DictReader(read_text(path, instead="name a CSV file").splitlines(keepends=True))
        columns = list(reader.fieldnames or [])
        rows: list[Row | UserError] = []
        for row in reader:
            extra = row.pop(None, None)
            if extra:
                rows.append(UserError(f"{len(columns) + len(extra)} values for {len(columns)} columns"))
            else:
                rows.append({key: value or "" for key, value in row.items()})
    except Unreadable as error:
        raise UserError(f"rows={error}") from None
    except csv.Error as error:
        raise UserError(f"rows={path} is not a CSV file in UTF-8: {error}") from error
    needed = [name for name in ("gpu", "tp", "pp", "seq") if name not in columns]
    if needed:
        raise UserError(f"rows={path} has no column {', '.join(needed)}; use the columns of runs.csv")
    return columns, rows


def write_answers(path: Path, columns: list[str], rows: Iterable[Row | UserError], answers: Sequence[Answer]) -> None:
    """The rows with their answers, as CSV."""
    kept = [name for name in columns if name not in ANSWERS]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*kept, *ANSWERS])
    for row, answer in zip(rows, answers, strict=True):
        values = ["" if isinstance(row, UserError) else row.get(name, "") for name in kept]
        writer.writerow([*values, *_cells(answer)])
    write_output(path, text.getvalue())


def _cells(answer: Answer) -> list[str]:
    if answer.skipped:
        return ["", "", "", "", answer.skipped]
    fits = "true" if answer.fits else "false"
    return [f"{answer.seconds:.6g}", f"{answer.tokens:.6g}", f"{answer.memory:.4g}", fits, ""]
