"""Models by name, from TOML, and from a Hugging Face `config.json`."""

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from cuboid.errors import UserError, either, nearest_names
from cuboid.readers import Table, parse_toml, read_json, read_safetensors_header, read_toml
from cuboid.spec.coding import decode, encode, field_types, require_known
from cuboid.spec.huggingface import is_known, table_from_config
from cuboid.spec.mixture import with_balancing
from cuboid.spec.model import ModelSpec
from cuboid.spec.plugin import PREFIX, PythonModelSpec, build_python_model, dump_python_model, is_plugin

TRANSFORMERS = "cuboid.model.transformers_model:build"

FAMILY_DEFAULTS: dict[str, Table] = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "norm_epsilon": 1e-6, "rope_theta": 1000000.0},
    "qwen3": {"qk_norm": True, "norm_epsilon": 1e-6, "rope_theta": 1000000.0},
    "mixtral": {},
    "qwen3_moe": {"qk_norm": True, "norm_epsilon": 1e-6, "rope_theta": 1000000.0},
    "deepseek_v3": {},
    "mistral": {},
    "gemma2": {
        "norms": "both",
        "unit_norms": True,
        "activation": "geglu",
        "norm_epsilon": 1e-6,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "tie_embeddings": True,
    },
    "gemma3_text": {
        "norms": "both",
        "unit_norms": True,
        "qk_norm": True,
        "activation": "geglu",
        "norm_epsilon": 1e-6,
        "rope_theta": 1000000.0,
        "tie_embeddings": True,
    },
    "olmo2": {"norms": "after", "qk_norm": True, "qk_norm_whole": True, "rope_theta": 500000.0},
    "olmo3": {"norms": "after", "qk_norm": True, "qk_norm_whole": True, "rope_theta": 500000.0},
    "gpt_oss": {
        "sinks": True,
        "activation": "clamped_swiglu",
        "qkv_bias": True,
        "output_bias": True,
        "rope_theta": 150000.0,
    },
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
        "max_positions": 1024,
    },
}
"""What a table of a family need not say."""


def build_model(table: Mapping[str, object], folder: Path = Path()) -> ModelSpec:
    """A model from a table; `base` names the model whose table it changes."""
    merged = _merge_base(dict(table), folder)
    if "python" in merged:
        return build_python_model(merged, folder)
    family = merged.get("family", "llama")
    defaults = FAMILY_DEFAULTS.get(family, {}) if isinstance(family, str) else {}
    if isinstance(merged.get("mixture"), Mapping):
        merged["mixture"] = with_balancing(merged["mixture"])
    return decode(ModelSpec, {**defaults, **merged}, "model")


def dump_model(model: ModelSpec) -> Table:
    """The table `build_model` turns back into an equal model; sizes that follow from others are omitted."""
    if isinstance(model, PythonModelSpec):
        return dump_python_model(model)
    table = encode(model)
    if model.kv_heads == model.heads:
        del table["kv_heads"]
    if model.head_dim * model.heads == model.hidden:
        del table["head_dim"]
    return table


def model_table(text: str, folder: Path = Path()) -> Table:
    """What a name or a file says of a model, before defaults: what follows from a changed size follows it."""
    if is_plugin(text):
        return {"python": text.removeprefix(PREFIX)}
    path = folder / text
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise UserError(f"model={text} cannot be read: {error.strerror}; name a file or a catalog model") from None
    if is_folder:
        path = path / "config.json"
        if not path.is_file():
            if text in catalog_models():  # a folder of outputs, say, that happens to be called like a model
                return catalog_table(text)
            raise UserError(f"model={text} is a folder without config.json; name a folder, a file or a catalog model")
    elif path.suffix not in (".toml", ".json"):
        return catalog_table(text)
    if not path.is_file():
        raise UserError(f"model={text} is not a file; name a TOML file, a config.json or a catalog model")
    if path.suffix == ".toml":
        return {"name": path.stem, **read_toml(path)}
    config = read_json(path)
    if path.name == "config.json" and "model_type" in config and not is_known(config):
        # Of another family: by its own modules, without tensor parallelism.
        return {
            "python": TRANSFORMERS,
            "options": {"folder": str(path.parent.resolve())},
            "name": path.resolve().parent.name,
        }
    named = path.resolve().parent.name if path.name == "config.json" else path.stem
    return as_stored(table_from_config(config, named), path.parent)


def as_stored(table: Table, folder: Path) -> Table:
    """Without prediction layers where weights lie beside the config.json and none is of such a layer: transformers
    drops these layers when it loads a model, and writes folders whose config.json still has them."""
    if not table.get("prediction_layers"):
        return table
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    names: object = None
    if index.is_file():
        names = read_json(index).get("weight_map")
    elif single.is_file():
        names = read_safetensors_header(single)
    first = f"model.layers.{table.get('layers')}.eh_proj.weight"
    return {**table, "prediction_layers": 0} if isinstance(names, dict) and first not in names else table


def catalog_table(name: str) -> Table:
    """The catalog's entry of a name."""
    known = catalog_models()
    if name not in known:
        raise UserError(f"unknown model={name}; did you mean {either(nearest_names(name, known))}?")
    return {"name": name, **known[name]}


@lru_cache(maxsize=1)
def catalog_models() -> dict[str, Table]:
    """Name -> table of every model in the catalog, in the order of its files."""
    found: dict[str, Table] = {}
    for entry in sorted((files("cuboid.spec.catalog") / "models").iterdir(), key=lambda entry: entry.name):
        found.update(parse_toml(entry.read_text(encoding="utf-8")))
    return found


MOST_BASES = 16
"""Models that a model is based on, one on the other; a file that names itself has no end."""


def _merge_base(table: Table, folder: Path, depth: int = 0) -> Table:
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise UserError(f"model.base={base} is not a string; name a catalog model or a file")
    if depth == MOST_BASES:
        raise UserError(
            f"model.base={base} is based on itself, or on more than {MOST_BASES} others; name one with sizes"
        )
    merged = _merge_base(model_table(base, folder), folder, depth + 1)
    for key, value in table.items():
        require_known(key, field_types(PythonModelSpec if "python" in merged else ModelSpec), "model")
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
