"""A model's folder from a stranger: nothing in it runs, nothing outside it is read, what is missing is named."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cuboid.checkpoint.huggingface.folder import INDEX, SINGLE, ModelFolder, model_of
from cuboid.checkpoint.weights import check_weights
from cuboid.errors import UserError
from tests.checkpoint.pretrained import save_pretrained


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("saved") / "model", "llama")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        model = model_of(folder)
        check_weights(ModelFolder(folder), model)
    return str(caught.value)


def change_index(folder: Path, name: str, file: str) -> None:
    table = json.loads((folder / INDEX).read_text())
    table["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(table))


def test_what_transformers_wrote_is_taken(folder: Path) -> None:
    weights = ModelFolder(folder)
    check_weights(weights, model_of(folder))
    assert len({tensor.file for tensor in weights.tensors.values()}) > 5
    whole = load_file(folder / weights.tensors["model.norm.weight"].file)["model.norm.weight"]
    assert torch.equal(weights.read("model.norm.weight", (slice(3, 9),)), whole[3:9])


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return (open, (str(self.path), "w"))


def test_a_pickle_is_refused_by_name_and_never_opened(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "created")))
    assert refusal(folder).startswith(f"hf:{folder} holds pytorch_model.bin, a pickle that could run code")
    (folder / SINGLE).write_bytes((folder / "pytorch_model.bin").read_bytes())
    assert refusal(folder).startswith(f"{folder / SINGLE} is damaged: ")
    assert not (tmp_path / "created").exists()
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder) == f"hf:{folder} holds no model.safetensors; name a folder with config.json and safetensors"


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "part/x.safetensors", "model.bin", ""])
def test_names_cannot_leave_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(next(folder.glob("*.safetensors")), tmp_path / "elsewhere.safetensors")
    change_index(folder, "lm_head.weight", name)
    assert refusal(folder).startswith(f"{folder / INDEX} is damaged: it names {name}, which is no safetensors file")


def test_links_may_lead_to_the_blobs_of_the_cache_and_nowhere_else(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    for path in folder.iterdir():
        blob = shutil.move(path, tmp_path / "models--x" / "blobs" / f"0{path.name}")
        (snapshot / path.name).symlink_to(blob)
    check_weights(ModelFolder(snapshot), model_of(snapshot))
    victim = next(snapshot.glob("*.safetensors"))
    outside = shutil.move(victim.resolve(), tmp_path / "outside")
    victim.unlink()
    victim.symlink_to(outside)
    assert refusal(snapshot) == f"{victim} is damaged: it is a link that leaves the folder; copy the model again"


def test_damaged_files_are_named(folder: Path) -> None:
    victim = sorted(folder.glob("*.safetensors"))[2]
    content = victim.read_bytes()
    victim.write_bytes(content[:-5])
    assert refusal(folder).startswith(f"{victim} is damaged: ")
    # A header that claims more than any file could hold.
    victim.write_bytes((1 << 62).to_bytes(8, "little") + content[8:])
    assert refusal(folder).startswith(f"{victim} is damaged: ")
    header = {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}
    text = json.dumps(header).encode()
    victim.write_bytes(len(text).to_bytes(8, "little") + text)
    assert refusal(folder).startswith(f"{victim} is damaged: ")
    victim.unlink()
    assert refusal(folder) == f"{victim} is damaged: it is missing; copy the model again"
    (folder / INDEX).write_text("[1, 2")
    assert refusal(folder).startswith(f"{folder / INDEX} is damaged: it is not JSON")


def test_tensors_that_do_not_fit_are_named(folder: Path) -> None:
    victim = folder / json.loads((folder / INDEX).read_text())["weight_map"]["model.norm.weight"]
    tensors = load_file(victim)
    save_file({**tensors, "model.norm.weight": torch.ones(33)}, victim)
    assert refusal(folder).startswith("model.norm.weight has shape (33,), not (32,)")
    save_file({**tensors, "model.norm.weight": torch.ones(32, dtype=torch.int8)}, victim)
    assert "model.norm.weight of" in refusal(folder) and "dtype I8" in refusal(folder)
    save_file(
        {name: values for name, values in tensors.items() if name != "model.norm.weight"} | {"x": torch.ones(1)}, victim
    )
    assert "holds x, which" in refusal(folder)
    save_file({**tensors, "lm_head.weight": torch.ones(259, 32)}, victim)
    assert "lm_head.weight stands in" in refusal(folder)


def test_a_tied_copy_that_differs_is_refused(tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "model", "qwen3", shard="1GB")
    tensors = load_file(folder / SINGLE)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / SINGLE)
    check_weights(ModelFolder(folder), model_of(folder))
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / SINGLE)
    assert refusal(folder).startswith("lm_head.weight differs from model.embed_tokens.weight")


def test_configs_that_are_not_understood_are_refused(folder: Path) -> None:
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"model_type": "mamba"}))
    assert refusal(folder).startswith('model_type="mamba" of model is unknown')
    (folder / "config.json").unlink()
    assert refusal(folder).startswith(f"hf:{folder} has no config.json")
    assert refusal(folder / "none").startswith(f"hf:{folder / 'none'} is no folder")
