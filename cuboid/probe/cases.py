"""Small trainings of one process whose steps the probe times, to learn what a layer costs beside matmuls. No torch."""

from cuboid.spec.run import Run, build_run

_SHAPES = (
    {"hidden": 64, "layers": 6, "ffn": 192, "vocab": 256, "sequence": 64},
    {"hidden": 256, "layers": 4, "ffn": 704, "vocab": 256, "sequence": 256},
    {"hidden": 256, "layers": 1, "ffn": 704, "vocab": 8192, "sequence": 256},
    {"hidden": 512, "layers": 2, "ffn": 1408, "vocab": 256, "sequence": 128},
)
"""One that is all overhead, one of usual layers, one that is all vocabulary, one of wide layers and few tokens."""


def cases() -> list[Run]:
    """One run for each case."""
    return [_case(dict(shape)) for shape in _SHAPES]


def _case(shape: dict[str, int]) -> Run:
    sequence = shape.pop("sequence")
    training = {"global_batch": 1, "sequence": sequence, "precision": "float32", "device": "cpu"}
    model = {**shape, "heads": 8, "kv_heads": 4, "family": "llama"}
    return build_run({"model": model, "training": training, "data": {"source": "synthetic"}})
