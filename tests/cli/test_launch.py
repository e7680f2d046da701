"""`cuboid launch`: what is missing or wrong is said in one sentence, and nothing is written then."""

import subprocess
import sys
from pathlib import Path

import pytest

from cuboid.cli.main import main

IMAGE = ["--image", "registry/cuboid:1", "--claim", "shared"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["slurm", "--time", "soon"], "error: time=soon is not a time of Slurm; use hours:minutes:seconds"),
        (["slurm", "--time", "60", "--partition", "a b"], "error: partition='a b' has a space in it"),
        (["slurm", "--time", "60", "--image", "x"], "error: image=x is for kubernetes and skypilot; omit it"),
        (["slurm", "--time", "60", "--interface", "eth0;ls"], "error: interface='eth0;ls' is no name of a network"),
        (["slurm", "--time", "60", "--nodes", "3"], "error: nodes=3 cannot share the 8 ranks of dp=2,tp=2,pp=2 evenly"),
        (["slurm", "--time", "60", "--nodes", "8"], "error: tp=2 crosses nodes of 1, where every layer would wait"),
        (["slurm", "--time", "60", "--gpus-per-node", "3"], "error: gpus-per-node=3 does not divide the 8 ranks"),
        (["slurm", "--time", "60", "--nodes", "2", "--min-nodes", "3"], "error: min-nodes=3 is more than the 2 nodes"),
        (["kubernetes", "--claim", "c"], "error: image is not known for kubernetes; use --image"),
        (["kubernetes", "--image", "i"], "error: claim is not known for kubernetes; use --claim"),
        (["kubernetes", *IMAGE, "--kind", "pod"], "error: kind=pod is not known; use kind=job or kind=trainjob"),
        (["kubernetes", *IMAGE, "--user", "0"], "error: user=0 is root, which a training need not be"),
        (["kubernetes", *IMAGE, "--memory", "much"], "error: memory=much is not an amount of Kubernetes"),
        (["kubernetes", *IMAGE, "--mount", "here"], "error: mount=here is not an absolute path"),
        (["skypilot"], 'error: checkpoint.folder="" is lost with a machine; use --bucket s3://bucket/run'),
        (["skypilot", "--bucket", "s3://b"], "error: the accelerator is not known for SkyPilot; use --accelerator"),
    ],
)
def test_what_is_not_known_is_asked_for(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = tmp_path / "run.toml", tmp_path / "job"
    run.write_text('model = "tiny-llama"\nlayout = "dp=2,tp=2,pp=2"\n[checkpoint]\nevery = 10\n')
    nodes = [] if {"--nodes", "--gpus-per-node"} & set(arguments) else ["--nodes", "2"]
    assert main(["launch", *arguments, str(run), *nodes, "-o", str(output)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(sentence)
    assert shown.err.count("\n") == 1
    assert not output.exists()


def test_nodes_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text('model = "tiny-llama"\nlayout = "dp=8"\n')
    assert main(["launch", "slurm", str(run), "--time", "60"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: the GPUs of a node are not known for 8 ranks; use --gpus-per-node"
    )


def test_writing_a_job_needs_no_torch(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('model = "tiny-llama"\n')
    code = f"""
import sys
from cuboid.cli.main import main
assert main(["launch", "slurm", {str(run)!r}, "--time", "60", "-o", {str(tmp_path / "job")!r}]) == 0
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "cuboid train" in (tmp_path / "job").read_text()
