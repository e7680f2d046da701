"""Kernels of our own compute what torch does, whatever the sizes; without a compiler nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cuboid.generate.detokenizer import Words
from cuboid.generate.kernels import KernelNorm, PanelTable, in_panels, load_kernels, use_kernels, wants_kernels
from cuboid.model.linear import Linear, Norm
from cuboid.spec.generation import SamplingSpec
from cuboid.spec.model import load_model
from tests.checkpoint.pretrained import save_pretrained
from tests.generate.jobs import CPU, texts
from tests.generate.test_equality import SAMPLED, requests, spec


@pytest.fixture(autouse=True)
def _the_same_numbers_each_time() -> None:
    torch.manual_seed(0)


def _matmul(outputs: int, inputs: int, bias: bool) -> Linear:
    made = Linear(inputs, outputs, bias).requires_grad_(False)
    for parameter in made.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(outputs))
    return made


@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 32, False), (13, 7, True), (8, 1, False), (3, 130, True)])
@pytest.mark.parametrize("columns_together", [True, False])
def test_matmuls_are_the_same(outputs: int, inputs: int, bias: bool, columns_together: bool) -> None:
    matmul = _matmul(outputs, inputs, bias)
    if columns_together:
        matmul.weight.data = matmul.weight.data.t().contiguous().t()
    rows = torch.randn(21, inputs + 1, generator=torch.Generator().manual_seed(1))[:, :inputs]
    expected = matmul.double()(rows.double()).float()
    matmul.float()
    assert use_kernels([nn.ModuleList([matmul])]) == ""
    whole = matmul(rows)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    for count in range(1, 18):
        # A row comes out the same to the last bit, whatever is multiplied with it.
        assert torch.equal(matmul(rows[:count]), whole[:count])


def test_threads_share_a_matmul() -> None:
    matmul, before = _matmul(1000, 64, False), torch.get_num_threads()
    rows = torch.randn(9, 64)
    expected = matmul(rows)
    use_kernels([nn.ModuleList([matmul])])
    try:
        torch.set_num_threads(3)
        torch.testing.assert_close(matmul(rows), expected, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 7), (8, 64), (1, 5, 3, 33), (200, 16)])
def test_norms_are_the_same(shape: tuple[int, ...]) -> None:
    model = load_model("tiny-llama")
    norm = Norm(model, shape[-1]).requires_grad_(False)
    norm.weight.data.normal_()
    x = torch.randn(*shape[:-1], shape[-1] + 2)[..., 1:-1]
    expected = norm(x)
    parent = nn.ModuleList([norm])
    assert use_kernels([parent]) == ""
    assert isinstance(parent[0], KernelNorm)
    torch.testing.assert_close(parent[0](x), expected, rtol=1e-5, atol=1e-6)


def test_rows_are_looked_up_in_panels() -> None:
    weight, indices = torch.randn(21, 6), torch.tensor([20, 0, 7, 8, 20])
    table = PanelTable(nn.Parameter(in_panels(weight), requires_grad=False))
    assert torch.equal(table(indices), weight[indices])


def test_a_kept_weight_stays_as_it_is() -> None:
    matmul, other = _matmul(8, 4, False), _matmul(8, 4, False)
    weight = matmul.weight
    assert use_kernels([nn.ModuleList([matmul, other])], kept=weight) == ""
    assert matmul.weight is weight
    assert torch.equal(other.weight, in_panels(weight))


@pytest.mark.parametrize("compiler", ["", "#!/bin/sh\necho no room for $1 >&2\nexit 1\n"])
def test_what_cannot_be_compiled_is_said(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if compiler:
        (tmp_path / "cc").write_text(compiler)
        (tmp_path / "cc").chmod(0o755)
    load_kernels.cache_clear()
    matmul = _matmul(8, 4, False)
    weight = matmul.weight
    reason = use_kernels([nn.ModuleList([matmul])])
    assert reason == (f"{tmp_path}/cc fails: no room for -O2" if compiler else "there is no C compiler; install gcc")
    assert matmul.weight is weight
    load_kernels.cache_clear()
    assert not list(tmp_path.glob("cache/cuboid/*"))


@pytest.mark.parametrize("case", ["llama", "gpt2", "deepseek-v3"])
def test_without_a_compiler_texts_are_the_same(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = spec(save_pretrained(tmp_path / "model", case), "dp=1")
    ways = [(SamplingSpec(), Words()), (SAMPLED, Words())]
    written, _, logits = texts(0, asked, requests(), ways)
    assert "install gcc" not in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    load_kernels.cache_clear()
    plain, _, expected = texts(0, asked, requests(), ways)
    load_kernels.cache_clear()
    assert ("install gcc" in capsys.readouterr().err) == wants_kernels(CPU, torch.float32)
    assert written == plain
    for number, row in logits.items():
        torch.testing.assert_close(row, expected[number], rtol=0, atol=1e-5)
