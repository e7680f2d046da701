"""`cuboid train` on bad input: one sentence, status 2, nothing started, no folder made."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.spec.training import DataSpec

MIXTURE = [f"model.mixture.{field}" for field in ("experts=4", "top_k=2", "expert_ffn=64")]


@pytest.fixture(autouse=True)
def _alone_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence. The folder of the run is claimed before any process starts, so without it none has."""
    before = sorted(Path().rglob("*"))
    assert main(["train", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return shown.err.removeprefix("error: ").strip()


def test_a_plan_is_not_trained_on_data_that_nobody_chose(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["tiny-llama", "cpux2", "--global-batch", "4", "--seq", "16", "--precision", "float32"]
    assert main(["plan", *question, "-o", "plan.toml"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "choose the data (data.source), the steps (training.steps), when to save (checkpoint.every)" in told
    assert "python-stdlib" not in Path("plan.toml").read_text()
    assert refused(capsys, "plan.toml") == (
        "data.source=to-choose is no data: a plan chooses the layout alone; use --set data.source=STORE (cuboid data "
        "build makes one, and python-stdlib is on every machine), and choose training.steps (now 100) and "
        "checkpoint.every (now 0)"
    )
    assert DataSpec(source="to-choose", mixture={"synthetic": 1.0}).sources == ("synthetic",), "a mixture is a choice"
    chosen = overrides("data.source=synthetic", "training.steps=1", "training.device=cpu")
    assert main(["train", "plan.toml", "--layout", "dp=1", *chosen]) == 0


def overrides(*fields: str) -> list[str]:
    return [argument for field in fields for argument in ("--set", field)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layout", "tp=3"], "tp=3 does not divide heads=8; use tp=2 or tp=4"),
        (["--layout", "tp=8", *overrides("model.ffn=100")], "tp=8 does not divide ffn=100; use tp=4"),
        (
            ["--layout", "dp=3"],
            "training.global_batch=16 does not divide by dp=3 × micro_batch=1; "
            "use training.global_batch=15 or training.global_batch=18",
        ),
        (
            ["--layout", "dp=2,micro_batch=3"],
            "training.global_batch=16 does not divide by dp=2 × micro_batch=3; use training.global_batch=12",
        ),
        (["--layout", "pp=2,schedule=2f2b"], "unknown schedule=2f2b; use schedule=1f1b"),
        (["--model", "tiny-lama"], "unknown model=tiny-lama; did you mean tiny-llama"),
        (["--model", "absent.toml"], "model=absent.toml is not a file; name a TOML file, a config.json"),
        (["--layout", "dq=2"], "unknown key dq; did you mean dp"),
        (overrides("training.step=3"), "unknown key training.step; did you mean training.steps"),
        (
            ["--layout", "pp=2,vpp=2"],
            "vpp=2 needs an interleaved schedule and schedule=1f1b is not one; use schedule=interleaved or vpp=1",
        ),
        (["--layout", "pp=16"], "pp=16 makes more stages than layers=8; use pp=8"),
        (
            ["--layout", "pp=8,schedule=interleaved"],
            "pp=8 × vpp=2 makes more stages than layers=8; use pp=4",
        ),
        (
            ["--layout", "cp=3"],
            "training.sequence=256 does not divide into the 2 × cp = 6 chunks that give every rank equal work; "
            "use training.sequence=252 or training.sequence=258",
        ),
        (["--layout", "dp=2,ep=2"], "ep=2 needs experts and tiny-llama has none; use ep=1"),
        (["--layout", "dp=2,ep=4", *overrides(*MIXTURE)], "ep=4 does not divide dp × cp × tp = 2; use ep=2"),
        (["--layout", "dp=3,ep=3", *overrides(*MIXTURE)], "ep=3 does not divide experts=4; use ep=2 or ep=4"),
        (
            ["--layout", "dp=6,tp=1,ep=2,zero=1,shard=3", *overrides(*MIXTURE)],
            "ep=2 does not divide shard × cp × tp = 3; use ep=1",
        ),
        (
            ["--layout", "tp=2,sequence_parallel=false", *overrides(*MIXTURE, "training.sequence=7")],
            "micro_batch=1 × training.sequence=7 tokens do not divide by tp=2 to be routed; use training.sequence=6",
        ),
        (
            overrides(*MIXTURE, "model.mlp_bias=true"),
            "model.mlp_bias=true has no place in routed experts; use mlp_bias=false",
        ),
        (
            ["--model", "tiny-deepseek", *overrides("model.qk_norm=true")],
            "model.qk_norm=true has no place in latent attention; use qk_norm=false",
        ),
        (
            overrides("model.vocab=256"),
            "model.vocab=256 is smaller than the 257 tokens of data.source=python-stdlib",
        ),
        (
            ["--model", "tiny-gpt2", *overrides("training.sequence=2048")],
            "training.sequence=2048 is longer than max_positions=1024 of tiny-gpt2; use training.sequence=1024 or less",
        ),
        (
            ["--layout", "tp=2", *overrides("training.sequence=7")],
            "micro_batch=1 × training.sequence=7 tokens do not divide by tp=2 under sequence_parallel; "
            "use training.sequence=6",
        ),
        (["absent.toml"], "absent.toml does not exist; name an existing TOML file"),
        (["."], ". is a folder, not a file; name an existing TOML file"),
        (["--stps", "3"], "No such option: --stps"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_arguments(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            'model = "tiny-llama"\n[training]\nsteps = "ten"\n',
            'training.steps="ten" is a string; it must be an int',
        ),
        ('model = "tiny-llama"\n[training]\nsteps = 1.5\n', "training.steps=1.5 is a number; it must be an integer"),
        ('model = "tiny-llama"\nlayout = 3\n', "layout=3 is not a table; write it as [layout]"),
        ("model = 3\n", "model=3 is not a table"),
        ('modle = "tiny-llama"\n', "unknown key modle; did you mean model"),
        ("[training]\nsteps = 3\n", 'model is missing; write model = "tiny-llama" or a [model] table'),
        ("model = \n", "run.toml is not TOML: Invalid value (at line 1"),
        ('model = "tiny-llama"\nmodel = "tiny-gpt2"\n', "run.toml is not TOML: Cannot overwrite a value"),
    ],
)
def test_bad_run_files(text: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(text)
    assert refused(capsys, "run.toml").startswith(sentence)


def test_a_run_file_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_bytes(b"\xff\xfe\x00")
    assert refused(capsys, "run.toml").startswith("run.toml is not UTF-8 text at byte 0")


@pytest.mark.parametrize("rank", ["0", "3"])
@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("dp=2,tp=2,pp=2", "dp=2 × tp=2 × pp=2 needs world_size=8, not 4; use dp=1 or start 8 ranks"),
        ("tp=8", "tp=8 needs world_size=8, not 4; start 8 ranks"),
        ("dp=1", "dp=1 needs world_size=1, not 4; use dp=4 or start 1 rank"),
    ],
)
def test_degrees_whose_product_is_not_the_world_size(
    layout: str, sentence: str, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert refused(capsys, "--layout", layout) == sentence


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [
        ("4", "RANK=4 is not below WORLD_SIZE=4; use RANK=0 to RANK=3"),
        ("first", "the variables of torchrun or Slurm are damaged: invalid literal for int() with base 10: 'first'"),
    ],
)
def test_ranks_that_cannot_be(
    rank: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert refused(capsys, "--layout", "dp=4").startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--layout", "dp=2", *overrides("training.device=cuda")],
            "training.device=cuda but this machine has no usable GPU; use device=cpu or device=auto",
        ),
        (
            ["--layout", "tp=2", *overrides("training.overlap_tensor=on")],
            "training.overlap_tensor=on needs a GPU and this machine has no usable one; "
            "use training.overlap_tensor=auto",
        ),
        (
            overrides("training.cuda_graphs=on", "data.attention_within_documents=false"),
            "training.cuda_graphs=on needs a GPU and this machine has no usable one; use training.cuda_graphs=auto",
        ),
    ],
)
def test_a_gpu_that_is_not_there(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refused(capsys, *arguments) == sentence


def test_a_folder_that_holds_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    held = Path("runs/default/run.toml")
    held.parent.mkdir(parents=True)
    held.write_text('model = "tiny-gpt2"\n')
    sentence = refused(capsys, "--layout", "dp=2")
    assert sentence == (
        "model is not that of the run in runs/default; use the same model, another output.folder, or --overwrite "
        "to start anew"
    )
    assert held.read_text() == 'model = "tiny-gpt2"\n'


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_run_file_of_a_person_is_not_written_over(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is what lies beside it removed, whatever it is called."""
    Path("run.toml").write_text('# mine\nmodel = "tiny-llama"\n')
    Path("samples.jsonl").write_text("mine")
    sentence = refused(capsys, "run.toml", *options, *overrides("output.folder=.", "training.steps=1"))
    assert sentence.startswith("output.folder=. holds a run.toml that no run has written, and this one would write")


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_folders_that_are_called_as_checkpoints_are_stay(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs/step-00000100").mkdir(parents=True)
    Path("theirs/step-00000100/model.pt").write_text("x")
    sentence = refused(capsys, *options, *overrides("checkpoint.folder=theirs", "training.steps=1"))
    assert sentence.startswith("theirs has step-00000100/model.pt, which is of no checkpoint, and old checkpoints are")
    before = sorted(Path().rglob("*"))
    assert main(["checkpoint", "prune", "theirs", "--keep", "1"]) == 2
    assert sorted(Path().rglob("*")) == before


def test_checkpoints_that_nobody_could_write_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that a link on another disk should lead to is not there."""
    Path("run").mkdir()
    Path("run/checkpoints").symlink_to("nowhere")
    sentence = refused(capsys, *overrides("output.folder=run", "checkpoint.every=1"))
    assert sentence == "checkpoint.folder=run/checkpoints cannot be written: File exists; use another folder"


def test_a_run_may_keep_its_checkpoints_beside_its_rows() -> None:
    fields = overrides("output.folder=run", "checkpoint.folder=run", "checkpoint.every=1", "training.steps=1")
    fields += overrides("training.sequence=8", "training.global_batch=1", "training.device=cpu")
    for options in ([], ["--overwrite"]):
        assert main(["train", *fields, *options]) == 0
    assert Path("run/step-00000001/manifest.json").exists() and Path("run/run.toml").exists()


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_folder_in_the_place_of_the_run_file_costs_no_row(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run/run.toml").mkdir(parents=True)
    Path("run/metrics.jsonl").write_text("")
    assert "run.toml is a folder" in refused(capsys, *options, *overrides("output.folder=run"))


def test_a_folder_that_is_a_file_or_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("mine\n")
    assert refused(capsys, "--set", "output.folder=taken") == "output.folder=taken is a file; use the name of a folder"
    assert refused(capsys, "--set", "output.folder=taken/run") == (
        "output.folder=taken/run cannot be written: Not a directory; use another folder"
    )
    assert Path("taken").read_text() == "mine\n"
