"""The best utilization anyone has published for an accelerator: a prediction above it deserves doubt.

Model FLOPs (attention in full, no recomputation) over the 16-bit peak, so 8-bit training can pass one half and more.
Each number is the best of the published runs in benchmarks/published for that accelerator and precision.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """The best published run."""

    utilization: float
    run: str


BEST: dict[tuple[str, str], Record] = {
    ("a100-40g", "bf16"): Record(0.581, "MPT-3B on 8 GPUs with FSDP (llm-foundry)"),
    ("a100-80g", "bf16"): Record(0.672, "Llama 2 7B on 128 GPUs with FSDP (IBM fms-fsdp)"),
    ("h100-80g", "bf16"): Record(0.624, "Llama 3 8B on 16 GPUs with NeMo (DGX Cloud)"),
    ("h100-80g", "fp8"): Record(0.898, "GPT-3 175B on 512 GPUs with NeMo 24.07"),
    ("h100-96g", "bf16"): Record(0.366, "Llama 3 8B on 8 GPUs with torchtitan"),
    ("h100-96g", "fp8"): Record(0.499, "Llama 3 8B on 8 GPUs with torchtitan"),
    ("b200", "bf16"): Record(0.573, "12 layers of Llama 3 70B on 8 GPUs with Megatron (SimuMax)"),
    ("b200", "fp8"): Record(0.788, "Llama 3 8B on 8 GPUs with Megatron Bridge"),
    ("gb200", "fp8"): Record(0.907, "Llama 3.1 405B on 256 GPUs with Megatron Bridge"),
    ("gb300", "fp8"): Record(1.088, "Llama 3.1 405B on 256 GPUs with Megatron Bridge"),
    ("v100-32g", "bf16"): Record(0.414, "GPT-1.3B on 8 GPUs with Megatron-DeepSpeed (bigscience)"),
}
LIKE = {"a800": "a100-80g", "h200": "h100-80g", "h800": "h100-80g", "b300": "b200", "gb200": "b200", "gb300": "gb200"}
"""Accelerator family -> the one whose record stands for it where it has none of its own."""


def record_of(accelerator: str, precision: str) -> Record | None:
    """The record of an accelerator, or of the one most like it."""
    seen = accelerator
    while (seen, precision) not in BEST:
        family = seen.split("-")[0]
        if family not in LIKE:
            alike = [name for name, kind in BEST if kind == precision and name.split("-")[0] == family]
            return BEST[alike[-1], precision] if alike else None
        seen = LIKE[family]
    return BEST[seen, precision]


def doubt(accelerator: str, precision: str, utilization: float, shown: str = "") -> str:
    """A sentence where a prediction beats every published run, else nothing. `shown`: the precision as the user calls
    it, where records know but one of 16 bits."""
    record = record_of(accelerator, precision)
    if record is None or utilization <= record.utilization:
        return ""
    return (
        f"predicted MFU {utilization:.1%} is above the best ever published for {accelerator} in {shown or precision}, "
        f"{record.utilization:.1%} ({record.run}); measure before you believe it"
    )
