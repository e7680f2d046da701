"""Objects of a user's own Python, by name: `python:folder/file.py:name` or `python:package.module:name`."""

import hashlib
import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cuboid.errors import UserError, either, nearest_names

PREFIX = "python:"


def is_plugin(text: str) -> bool:
    """Whether it names an object of a user's own."""
    return text.startswith(PREFIX)


def resolve(text: str, folder: Path, where: str) -> str:
    """The same name with the whole path of its file, which any folder finds. `where`: the setting it stands in."""
    source, colon, name = text.removeprefix(PREFIX).rpartition(":")
    if not colon or not source or not name:
        raise UserError(f"{where}={text} names no object; write it like {PREFIX}my_model.py:build")
    if not source.endswith(".py"):
        return text
    for path in (folder / source, Path(source)):
        if path.is_file():
            return f"{PREFIX}{path.resolve()}:{name}"
    raise UserError(f"{where}={text}: {source} is not a file; name a file beside the run or in this folder")


def resolve_here(text: str, where: str) -> str:
    """As `resolve`, in the folder of the command."""
    return resolve(text, Path(), where)


def load_plugin(text: str, where: str) -> Any:
    """The object itself. What its file raises as it is imported is said as it is."""
    source, _, name = text.removeprefix(PREFIX).rpartition(":")
    module = _from_file(Path(source).resolve()) if source.endswith(".py") else _from_package(source, text, where)
    if not hasattr(module, name):
        near = either(nearest_names(name, [known for known in vars(module) if not known.startswith("_")]))
        raise UserError(f"{where}={text}: {source} has no {name}; did you mean {near}?")
    return getattr(module, name)


@cache
def _from_file(path: Path) -> ModuleType:
    # One name for each file: two files called model.py are two modules.
    name = f"cuboid_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be imported; name a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Files beside it can be imported by it, as if it were run.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _from_package(source: str, text: str, where: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as problem:
        raise UserError(f"{where}={text}: {problem}; name an installed module or a .py file") from None
