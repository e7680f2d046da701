"""What nanotron makes of exported files: `python read_nanotron.py CHECKOUT FILE…` prints {file: fields or error}.

Its `get_config_from_file` reads each file. Kernels that need a GPU to be imported (flash-attn) are empty modules.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

KERNELS = ("flash_attn", "grouped_gemm", "functorch")


class Empty(types.ModuleType):
    """A module of kernels nobody calls."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "2.7.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the kernels' modules."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        known = name.split(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def read(file: Path) -> dict[str, Any]:
    """The fields of one file."""
    from nanotron.config import get_config_from_file

    config = get_config_from_file(str(file))
    parallel, tokens, optimizer, model = config.parallelism, config.tokens, config.optimizer, config.model.model_config
    rate, engine = optimizer.learning_rate_scheduler, type(parallel.pp_engine).__name__
    schedule = {"OneForwardOneBackwardPipelineEngine": "1f1b", "AllForwardAllBackwardPipelineEngine": "gpipe"}[engine]
    assert type(model).__name__ == "LlamaConfig"
    return {
        "world": parallel.dp * parallel.tp * parallel.pp * parallel.context_parallel_size,
        "dp": parallel.dp,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_parallel_size,
        "sequence_parallel": parallel.tp > 1 and parallel.tp_mode.name == "REDUCE_SCATTER",
        "zero": optimizer.zero_stage,
        "micro_batch": tokens.micro_batch_size,
        "global_batch": config.global_batch_size,
        "micro_batches": tokens.batch_accumulation_per_replica,
        "sequence": tokens.sequence_length,
        "recompute": "full" if parallel.recompute_layer else "none",
        "schedule": schedule if parallel.pp > 1 else None,
        "precision": {"torch.bfloat16": "bf16", "torch.float32": "float32"}[str(config.model.dtype)],
        "model.layers": model.num_hidden_layers,
        "model.hidden": model.hidden_size,
        "model.heads": model.num_attention_heads,
        "model.kv_heads": model.num_key_value_heads,
        "model.ffn": model.intermediate_size,
        "model.vocab": model.vocab_size,
        "model.norm_epsilon": model.rms_norm_eps,
        "model.rope_theta": model.rope_theta,
        "model.rope_scaling": model.rope_scaling,
        "model.tie_embeddings": model.tie_word_embeddings,
        "model.qkv_bias": model.attention_bias,
        "model.initial_std": config.model.init_method.std,
        "steps": tokens.train_steps,
        "learning_rate": rate.learning_rate,
        "least_learning_rate": rate.min_decay_lr,
        "decay": rate.lr_decay_style,
        "warmup_steps": rate.lr_warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "betas": [optimizer.optimizer_factory.adam_beta1, optimizer.optimizer_factory.adam_beta2],
        "epsilon": optimizer.optimizer_factory.adam_eps,
        "gradient_clip": optimizer.clip_grad,
    }


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]) / "src"))
    sys.meta_path.insert(0, Finder())
    found: dict[str, Any] = {}
    for name in sys.argv[2:]:
        try:
            found[Path(name).name] = read(Path(name))
        except (Exception, SystemExit) as error:
            found[Path(name).name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
