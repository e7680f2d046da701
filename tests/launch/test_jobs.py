"""Job files: valid for the schedulers they are for, the same each time, with nothing in them that should not be."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.launch.jobs.job import check_tensor_groups, job_name, make_job
from cuboid.spec.coding import dumps
from cuboid.spec.ranks import groups
from cuboid.spec.run import build_run, dump_run, load_run

SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {
    "Job": ("kubernetes", "io.k8s.api.batch.v1.Job"),
    "Service": ("kubernetes", "io.k8s.api.core.v1.Service"),
    "ConfigMap": ("kubernetes", "io.k8s.api.core.v1.ConfigMap"),
    "TrainJob": ("kubeflow", "TrainerV1alpha1TrainJob"),
    "TrainingRuntime": ("kubeflow", "TrainerV1alpha1TrainingRuntime"),
}
SLURM = ("slurm", "--time", "24:00:00", "--partition", "gpu", "--account", "a", "--qos", "q", "--constraint", "x&y")
POD = ("--image", "registry/cuboid:1", "--claim", "shared", "--namespace", "team", "--memory", "512Gi", "--cpus", "64")
JOB = ("kubernetes", *POD, "--secret", "store")
TRAINJOB = ("kubernetes", *POD, "--kind", "trainjob")
SKY = ("skypilot", "--bucket", "s3://bucket/run", "--spot", "--infra", "aws/us-east-1", "--accelerator", "H100")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run file.toml"
    path.write_text('model = "tiny-llama"\nlayout = "dp=4,tp=2,pp=2"\n[checkpoint]\nevery = 100\n')
    return path


def written(file: Path, scheduler: str, *options: str) -> str:
    target = file.with_suffix(".job")
    assert main(["launch", scheduler, str(file), "--gpus-per-node", "4", *options, "-o", str(target)]) == 0
    return target.read_text()


def schema_errors(document: Any) -> list[str]:
    if document["kind"] == "NetworkPolicy":  # its test compares it whole
        return []
    file, name = KINDS[document["kind"]]
    schema = json.loads((SCHEMAS / f"{file}.json").read_text())
    return [
        error.message for error in Draft202012Validator({**schema, "$ref": f"#/$defs/{name}"}).iter_errors(document)
    ]


def documents(text: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pod_of(found: dict[str, Any]) -> Any:
    if "Job" in found:
        return found["Job"]["spec"]["template"]["spec"]
    replicated = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    return replicated["template"]["spec"]["template"]["spec"]


def test_sbatch_scripts_are_bash_with_options_slurm_has(run_file: Path) -> None:
    text = written(run_file, *SLURM, "--setup", "source .venv/bin/activate")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    known = (SCHEMAS / "sbatch.txt").read_text().split("\n")
    given_options = re.findall(r"^#SBATCH (--[a-z-]+)", text, re.MULTILINE)
    assert {f"sbatch {option}" for option in given_options} <= set(known)
    assert len(given_options) == text.count("\n#SBATCH ")
    srun = text[text.index("\nsrun ") :].partition("cuboid")[0]
    assert {f"srun {option}" for option in re.findall(r"--[a-z-]+", srun)} <= set(known)
    for line in ("nodes=4", "gpus-per-node=4", "ntasks-per-node=1", "signal=USR1@330", "requeue", "partition=gpu"):
        assert f"\n#SBATCH --{line}\n" in text
    assert text.index("source .venv/bin/activate") < text.index("\nsrun ")
    assert f'cuboid train {shlex.quote(str(run_file))} --nodes 4 --rendezvous "$head:29400"' in text


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize(
    ("ended", "requeued"), [(0, False), (1, False), (75, True)], ids=["finished", "failed", "told to stop"]
)
def test_the_script_requeues_after_75_and_ends_as_the_training_did(
    ended: int, requeued: bool, elastic: bool, run_file: Path, tmp_path: Path
) -> None:
    """With stand-ins for Slurm's own commands; `benchmarks/slurm.py` does the same with a real Slurm. In an elastic job
    srun ends as a lost node did."""
    run_here = 'while [[ "$1" == --* ]]; do shift; done; SLURM_NODEID=0 "$@"'
    commands = {
        "srun": f"{run_here}; exit 137" if elastic else run_here,
        "scontrol": 'echo "$@" | tee -a asked',
        "cuboid": f"exit {ended}",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
    text = written(run_file, *SLURM, *(["--min-nodes", "2"] if elastic else []))
    done = subprocess.run(["bash", "-c", text], env={**variables, "SLURM_SUBMIT_DIR": str(tmp_path)}, check=False)
    assert done.returncode == ended
    assert ("requeue 7" in (tmp_path / "asked").read_text()) is requeued
    assert list(tmp_path.glob(".*.code*")) == []


@pytest.mark.parametrize("options", [JOB, TRAINJOB], ids=["job", "trainjob"])
@pytest.mark.parametrize("layout", ["dp=4,tp=2,pp=2", "tp=4"])
def test_manifests_fit_the_schemas(options: tuple[str, ...], layout: str, run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("dp=4,tp=2,pp=2", layout))
    found = documents(written(run_file, *options))
    assert [message for document in found.values() for message in schema_errors(document)] == []
    assert set(found) >= {"ConfigMap", *(["TrainingRuntime", "TrainJob"] if options is TRAINJOB else ["Job"])}
    assert found["ConfigMap"]["data"]["run.toml"] == dump_run(load_run(run_file, ["resilience.grace_seconds=300.0"]))


def test_schemas_refuse_what_kubernetes_would() -> None:
    broken = {"kind": "Job", "apiVersion": "batch/v1", "spec": {"template": {}, "paralelism": 2}}
    assert schema_errors(broken) != []


@pytest.mark.parametrize("options", [JOB, TRAINJOB], ids=["job", "trainjob"])
def test_pods_run_as_nobody_special_and_name_their_port(options: tuple[str, ...], run_file: Path) -> None:
    pod = pod_of(documents(written(run_file, *options, "--grace", "120", "--port", "30000")))
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["ports"] == [{"name": "rendezvous", "containerPort": 30000}]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "cpu": 64, "memory": "512Gi"}
    assert pod["terminationGracePeriodSeconds"] == 150
    assert container["command"][:2] == ["cuboid", "train"]


@pytest.mark.parametrize("options", [JOB, TRAINJOB], ids=["job", "trainjob"])
def test_pods_of_one_job_alone_reach_each_other_and_know_its_secret(options: tuple[str, ...], run_file: Path) -> None:
    text = written(run_file, *options)
    found = documents(text)
    policy, pod = found["NetworkPolicy"], pod_of(found)
    if options is JOB:
        labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
    else:
        replicated = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]
        labels = replicated["template"]["spec"]["template"]["metadata"]["labels"]
    assert policy["apiVersion"] == "networking.k8s.io/v1" and policy["metadata"]["namespace"] == "team"
    only = {"podSelector": {"matchLabels": labels}}
    assert policy["spec"] == {**only, "policyTypes": ["Ingress"], "ingress": [{"from": [only]}]}
    (variable,) = pod["containers"][0]["env"]
    assert variable["name"] == "CUBOID_SECRET"
    known = variable["valueFrom"]["secretKeyRef"]
    assert f"kubectl -n team create secret generic {known['name']} --from-literal={known['key']}=" in text
    alone = documents(written(run_file, *options, "--set", "layout=tp=4"))
    assert "NetworkPolicy" not in alone and "env" not in pod_of(alone)["containers"][0]


def test_every_launch_on_many_nodes_passes_a_secret_that_no_file_holds(run_file: Path) -> None:
    slurm = written(run_file, *SLURM)
    line = next(line for line in slurm.splitlines() if line.startswith("export CUBOID_SECRET="))
    assert slurm.index(line) < slurm.index("\nsrun ")
    command = ["bash", "-c", f"{line}; printenv CUBOID_SECRET"]
    made = [
        subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}).stdout
        for _ in range(2)
    ]
    assert all(re.fullmatch(r"[0-9a-f]{64}\n", each) for each in made) and made[0] != made[1]
    given_one = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "CUBOID_SECRET": "mine"}
    )
    assert given_one.stdout == "mine\n"
    sky = written(run_file, *SKY)
    assert yaml.safe_load(sky)["secrets"] == {"CUBOID_SECRET": None} and "--secret CUBOID_SECRET=$(openssl" in sky
    ray = written(run_file, "ray")
    assert "secret = secrets.token_hex(32)" in ray and '"CUBOID_SECRET": secret' in ray


def test_the_plain_job_gives_every_pod_a_name(run_file: Path) -> None:
    found = documents(written(run_file, *JOB, "--name", "My Run.1"))
    spec, service = found["Job"]["spec"], found["Service"]
    assert spec["completions"] == spec["parallelism"] == 4
    assert spec["completionMode"] == "Indexed"
    assert pod_of(found)["subdomain"] == service["metadata"]["name"] == "my-run-1"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert "my-run-1-0.my-run-1:29400" in pod_of(found)["containers"][0]["command"]
    rules = spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("Ignore", [75]),
        ("Ignore", None),
        ("FailJob", [2]),
    ]


@pytest.mark.parametrize("options", [SKY, (*SKY, "--image", "registry/cuboid:1", "--cpus", "8")])
def test_tasks_of_skypilot_fit_its_schema(options: tuple[str, ...], run_file: Path) -> None:
    task = yaml.safe_load(written(run_file, *options))
    schema = json.loads((SCHEMAS / "skypilot.json").read_text())
    assert [error.message for error in Draft202012Validator(schema).iter_errors(task)] == []
    assert task["num_nodes"] == 4
    assert task["resources"]["accelerators"] == "H100:4"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert "checkpoint.folder=s3://bucket/run" in task["run"]
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)


@pytest.mark.parametrize("options", [SLURM, JOB, TRAINJOB, SKY], ids=["slurm", "job", "trainjob", "skypilot"])
def test_files_are_the_same_each_time_and_know_how_they_were_written(options: tuple[str, ...], run_file: Path) -> None:
    text = written(run_file, *options)
    assert written(run_file, *options) == text
    line = re.search(r"Written by: (cuboid launch .*)", text)
    assert line is not None
    again = run_file.with_suffix(".again")
    assert main([*shlex.split(line[1])[1:], "-o", str(again)]) == 0
    assert again.read_text() == text


@pytest.mark.parametrize("options", [SLURM, JOB, TRAINJOB, SKY], ids=["slurm", "job", "trainjob", "skypilot"])
def test_elastic_jobs_say_with_how_few_they_go_on(options: tuple[str, ...], run_file: Path) -> None:
    text = written(run_file, *options, "--min-nodes", "2", "--interface", "eth0").replace('", "', " ")
    assert "--min-nodes 2 --max-nodes 4 --interface eth0" in text
    assert ("--no-kill" in text) is (options is SLURM)
    assert ("gather_seconds" in text) is (options is not SLURM)


def test_a_plan_knows_its_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    assert main(["plan", "llama3-8b", "h100x64", "--global-batch", "128", "--seq", "4096", "-o", str(plan)]) == 0
    capsys.readouterr()
    assert main(["launch", "skypilot", str(plan), "--bucket", "gs://b/r", "--json"]) == 2
    assert "data.source=to-choose is no data: a plan chooses the layout alone; use --set" in capsys.readouterr().err
    data = ["--set", "data.source=stores/web"]
    assert main(["launch", "skypilot", str(plan), "--bucket", "gs://b/r", "--json", *data]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["nodes"], said["ranks_per_node"]) == (8, 8)
    assert "H100:8" in said["text"]
    assert "gcsfs" in said["text"]
    assert main(["launch", "slurm", str(plan), "--time", "60", "--min-nodes", "5", *data]) == 0
    assert re.search(r"# Ranks .* With 5 of the nodes: dp=\d+", capsys.readouterr().out)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_tensor_groups_stay_inside_nodes_or_are_refused(tp: int, dp: int, cp: int, per_node: int) -> None:
    model = {"base": "tiny-llama", "heads": 8, "kv_heads": 8, "hidden": 256}
    run = build_run({"model": model, "layout": f"dp={dp},tp={tp},cp={cp}"}, ["training.device=cpu"])
    if run.layout.world_size % per_node:
        return
    inside = all(len({rank // per_node for rank in group}) == 1 for group in groups(run.layout)["tp"])
    if inside:
        check_tensor_groups(run, per_node)
        assert make_job(run, "run.toml", gpus_per_node=per_node, grace_seconds=60).ranks_per_node == per_node
    else:
        with pytest.raises(UserError, match=rf"tp={tp} crosses nodes of {per_node}"):
            make_job(run, "run.toml", gpus_per_node=per_node, grace_seconds=60)
        assert (
            make_job(run, "run.toml", gpus_per_node=per_node, grace_seconds=60, across_nodes=True).ranks_per_node
            == per_node
        )


def test_the_grace_period_is_measured_where_the_run_has_saved(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_file.parent / "runs"
    folder.mkdir()
    saves = [{"stall_seconds": 2.0, "write_seconds": 40.0, "warning": ""}, {"stall_seconds": 0.0, "write_seconds": 9.0}]
    times: list[dict[str, object]] = [{"seconds": 90.0}, {"seconds": 8.0, "checkpoints": saves}, {"seconds": 7.0}]
    rows = [{"step": step, "loss": 6.0, "gradient_norm": 1.0, "tokens": 64, **row} for step, row in enumerate(times)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"seconds": 99')
    assert "signal=USR1@130\n" in written(run_file, *SLURM, "--set", f"output.folder={folder}")
    assert "measured" in capsys.readouterr().out
    assert "signal=USR1@37\n" in written(run_file, *SLURM, "--set", f"output.folder={folder}", "--grace", "7")


def test_names_suit_every_scheduler() -> None:
    assert job_name("Llama 3.1/8B") == "llama-3-1-8b"
    assert job_name("7b") == "run-7b"
    assert job_name("ü" * 3) == "run"
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", job_name("a" * 39 + "--b")) is not None


def test_nothing_breaks_out_of_a_comment(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(dumps({"model": {"base": "tiny-llama", "name": "x\nrm -rf /\n#SBATCH --exclusive=user"}}))
    for options in (SLURM, JOB, TRAINJOB, SKY):
        text = written(run, *options, "--set", "output.folder=a\nb", "--name", "x")
        assert not [line for line in text.splitlines() if line.startswith(("rm", "#SBATCH --exclusive="))]
        if options is SKY:
            assert "output.folder=a\nb" in shlex.split(yaml.safe_load(text)["run"])


def test_a_password_never_gets_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(dumps({"model": "tiny-llama", "checkpoint": {"folder": "s3://key:hunter2@bucket/run"}}))
    assert main(["launch", "slurm", str(path), "--time", "60", "-o", str(tmp_path / "job")]) == 2
    assert "hunter2" not in capsys.readouterr().err
    assert not (tmp_path / "job").exists()
