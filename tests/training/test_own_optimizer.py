"""Optimizers other than AdamW: the same on any layout, continued on another, with the run's rate and decay; what would
not compute the same is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.checkpoint.storage import whole_tensors
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run, build_run, dump_run, load_run
from cuboid.training.own_optimizer import check_optimizer
from cuboid.verification.reference import reference_trace
from tests.parallel.cases import assert_equal, small_run

OWN = """
import torch

class Signed(torch.optim.Optimizer):
    '''Like Lion, with a sign that is smooth, so that rounding stays small. Keeps a tensor and a plain number.'''

    def __init__(self, params, beta=0.9):
        super().__init__(params, {"lr": 1e-4, "weight_decay": 0.0, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                state["count"] = state.get("count", 0) + 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.tanh(100 * momentum.lerp(p.grad, 1 - group["beta"])), alpha=-group["lr"] / state["count"])
                momentum.lerp_(p.grad, 0.01)

def signed(groups, beta=0.9):
    return Signed(groups, beta)

def adamw(groups, **options):
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), **options)

def matrices_apart(groups):
    '''Muon for matrices, twenty times as fast, and SGD for the rest.'''
    made = []
    for wanted in (True, False):
        chosen = [
            {"params": [p for p, s in zip(g["params"], g["shapes"]) if (len(s) == 2) == wanted],
             "lr": g["lr"] * (20 if wanted else 1), "weight_decay": g["weight_decay"]}
            for g in groups
        ]
        chosen = [group for group in chosen if group["params"]]
        if chosen:
            made.append(torch.optim.Muon(chosen) if wanted else torch.optim.SGD(chosen))
    return made

def forgets_some(groups):
    return torch.optim.SGD(groups[:1])

class NormScaled(Signed):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])

class Rows(Signed):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = p.detach().flatten()[:3].clone()

def number(groups):
    return 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"optimizer.python=python:{tmp_path}/own.py:"


def small(layout: str, *settings: str) -> Run:
    return small_run(layout, "model.layers=3", "model.vocab=131", *settings)


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "dp=2,tp=2,pp=2", "dp=2,zero=1,pp=2,schedule=zb1p"])
def test_an_own_optimizer_equals_one_process(pool: Pool, own: str, layout: str) -> None:
    run = small(layout, f"{own}signed", "optimizer.options.beta=0.8")
    check_optimizer(run)
    assert_equal(pool, run)


@pytest.mark.parametrize("setting", ["optimizer.kind=nadam", "optimizer.kind=rmsprop"])
def test_an_optimizer_of_torch_by_name_equals_one_process(pool: Pool, setting: str) -> None:
    run = small("dp=2,zero=2,tp=2", setting)
    check_optimizer(run)
    assert_equal(pool, run)


def test_master_weights_beside_16_bits_are_what_is_updated(pool: Pool, own: str) -> None:
    run = small("dp=2,zero=3", f"{own}signed", "training.precision=bf16")
    assert_equal(pool, run)


def test_whole_matrices_where_no_rank_cuts_them(pool: Pool, own: str) -> None:
    run = small("dp=2,pp=2", f"{own}matrices_apart", "optimizer.whole_parameters=true")
    check_optimizer(run)
    assert_equal(pool, run)


def test_torchs_own_adamw_as_a_factory_is_the_engines(own: str) -> None:
    usual = reference_trace(small("dp=1"))
    other = reference_trace(small("dp=1", f"{own}adamw"))
    for name, tensor in usual.parameters[-1].items():
        assert torch.allclose(other.parameters[-1][name], tensor, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize(
    "settings",
    [
        ("signed",),
        ("kind", "optimizer.kind=sgd", "optimizer.options.momentum=0.9", "optimizer.options.dampening=0.5"),
    ],
)
def test_it_continues_on_another_layout(pool: Pool, own: str, tmp_path: Path, settings: tuple[str, ...]) -> None:
    name, *changes = settings
    asked = tuple(changes) or (f"{own}{name}",)
    common = ("training.steps=4", "training.global_batch=8", *asked)
    alone = small("dp=1", *common)
    expected = pool.run("tests.checkpoint.jobs:train_part", (alone, str(tmp_path / "one"), 0, 4, None), ranks=1)[0]
    seen: list[float] = []
    source: str | None = None
    for done, layout in ((0, "dp=2,zero=3"), (2, "tp=2,pp=2")):
        run = small(layout, *common)
        arguments = (run, str(tmp_path / "many"), done, done + 2, source)
        seen += pool.run("tests.checkpoint.jobs:train_part", arguments, ranks=run.layout.world_size)[0]
        source = str(checkpoint_path(tmp_path / "many", done + 2))
    assert seen == pytest.approx(expected, rel=1e-9)
    reference, final = (whole_tensors(checkpoint_path(tmp_path / kind, 4)) for kind in ("one", "many"))
    assert final.keys() == reference.keys()
    assert {key.partition("/")[0] for key in final} > {"parameter"}
    for key, tensor in reference.items():
        assert torch.allclose(final[key], tensor, rtol=1e-9, atol=1e-12), key


def test_a_run_of_an_own_optimizer_comes_back_from_its_file(own: str, tmp_path: Path) -> None:
    run = build_run({"model": "tiny-llama"}, [f"{own}signed", "optimizer.options.beta=0.8"])
    (tmp_path / "run.toml").write_text(dump_run(run))
    assert load_run(tmp_path / "run.toml") == run
    assert run.optimizer.options == {"beta": 0.8}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NormScaled", "does not update every element by itself"),
        ("matrices_apart", "does not update every element by itself"),
        ("number", "returns int; it must return a torch.optim.Optimizer"),
        ("forgets_some", "does not update"),
        ("signd", "has no signd; did you mean signed"),
        ("Signed", "cannot be built"),
    ],
)
def test_what_would_not_compute_the_same_is_refused(own: str, name: str, reason: str) -> None:
    options = ["optimizer.options.gamma=1"] if name == "Signed" else []
    run = build_run({"model": "tiny-llama"}, [f"{own}{name}", *options])
    with pytest.raises(UserError, match=reason):
        check_optimizer(run)


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_kinds_that_need_whole_matrices_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match=f"optimizer.kind={kind} "):
        check_optimizer(build_run({"model": "tiny-llama"}, [f"optimizer.kind={kind}"]))


def test_state_that_no_checkpoint_holds_is_refused(pool: Pool, own: str) -> None:
    with pytest.raises(Exception, match=r"keeps rows of .*, which is neither a number"):
        pool.run("cuboid.verification.compare:verify_rank", (small("dp=1", f"{own}Rows"),), ranks=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["optimizer.kind=sdg"], "optimizer.kind=sdg is unknown; use sgd"),
        (["optimizer.kind=sgd", "optimizer.beta1=0.8"], "optimizer.beta1=0.8 means nothing to optimizer.kind=sgd"),
        (["optimizer.options.momentum=0.9"], "mean nothing to AdamW"),
        (["optimizer.python=my.py:build"], "names no factory"),
        (["optimizer.kind=sgd", "optimizer.python=python:my.py:build"], "use one of them"),
        (["optimizer.kind=sgd", "layout.offload=true"], "offload=true is for AdamW"),
        (["optimizer.kind=sgd", "optimizer.whole_parameters=true", "layout.tp=2"], "but tp=2 cuts them"),
        (["optimizer.kind=sgd", "optimizer.whole_parameters=true", "layout=dp=2,zero=1"], "but zero=1 cuts them"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_optimizer(build_run({"model": "tiny-llama"}, settings))
