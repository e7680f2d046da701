"""Generation beside `generate` of transformers, in one run on the same weights: tokens per second, time to the first
token, and the cache's memory beside the planner's figure.

    python benchmarks/generate.py                                      # on the CPU: a small Llama, 8 prompts
    python benchmarks/generate.py --shape 8B --device cuda --prompts 32 --length 512 --tokens 128
    python benchmarks/generate.py --layouts dp=1 tp=2 pp=2 dp=2        # ours on several layouts

Prompts have random lengths up to `--length`. Greedy, nothing ends a text early, the two in turn, the fastest of
`--repeats`. In float32 both must write the same tokens; in bf16 `same_tokens` says how far texts go together, which is
until two tokens are equally likely to two digits. Both have the same random weights, made on the device. How far it is
goes to the error stream."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cuboid.checkpoint.huggingface.folder import model_of
from cuboid.generate.batch import Event, Request
from cuboid.generate.detokenizer import Words
from cuboid.generate.engine import Generator, make_generator
from cuboid.launch.pool import Pool
from cuboid.spec.generation import GenerationSpec, SamplingSpec, cache_bytes, parse_layout

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 8192},
    "small": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 32000},
    "1B": {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "8B": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
}
Timing = dict[str, Any]
START = time.perf_counter()


def make_model(shape: str, dtype: torch.dtype, device: torch.device) -> Any:
    sizes = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        intermediate_size=sizes["ffn"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def theirs(model: Any, prompts: list[tuple[int, ...]], tokens: int, device: torch.device) -> Timing:
    """One batch, filled up on the left, as their documentation says."""
    width = max(map(len, prompts))
    given = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    seconds = {}
    for count in (1, tokens):
        synchronize(device)
        start = time.perf_counter()
        written = model.generate(
            given, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        synchronize(device)
        seconds[count] = time.perf_counter() - start
    texts = written[:, width:].tolist()
    return {"seconds": seconds[tokens], "first_token": seconds[1], "texts": texts}


def ours(generator: Generator, requests: list[Request]) -> Timing:
    texts: dict[int, list[int]] = {}
    firsts: list[float] = []

    def heard(events: list[Event]) -> None:
        for event in events:
            if event.number not in texts:
                firsts.append(time.perf_counter() - start)
            texts.setdefault(event.number, []).append(event.token)

    synchronize(generator.device)
    start = time.perf_counter()
    generator.generate(requests, SamplingSpec(), Words(), heard)
    synchronize(generator.device)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "first_token": max(firsts, default=0.0), "texts": texts}


def on_rank(rank: int, spec: GenerationSpec, requests: list[Request], repeats: int) -> tuple[Timing, int]:
    """The fastest of several, and the bytes of this rank's cache."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if spec.device == "cuda" else torch.device("cpu")
    generator = make_generator(spec, rank, device)
    return min((ours(generator, requests) for _ in range(repeats)), key=lambda timing: timing["seconds"]), (
        generator.cache_bytes
    )


def say(text: str) -> None:
    print(f"{time.perf_counter() - START:6.1f} s  {text}", file=sys.stderr, flush=True)


def same_tokens(texts: Any, reference: list[list[int]]) -> float:
    """The part of each text up to which it is theirs, of all texts."""
    shared = 0
    for number, expected in enumerate(reference):
        pairs = enumerate(zip(texts[number], expected, strict=True))
        shared += next((place for place, (one, other) in pairs if one != other), len(expected))
    return shared / sum(map(len, reference))


def on_ranks(pool: Pool, spec: GenerationSpec, requests: list[Request], repeats: int) -> Timing:
    told = pool.run(
        "benchmarks.generate:on_rank",
        (spec, requests, repeats),
        ranks=spec.layout.world_size,
        device=spec.device,
        backend=spec.backend,
        joined=lambda joined: say(joined["sentence"]),
    )
    return {
        "texts": {number: text for timing, _ in told for number, text in timing["texts"].items()},
        "seconds": max(timing["seconds"] for timing, _ in told),
        "first_token": max(timing["first_token"] for timing, _ in told),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="auto", choices=("auto", "nccl", "gloo"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layouts", nargs="*", default=["dp=1"])
    options = parser.parse_args()
    precision = "bf16" if options.device == "cuda" else "float32"
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    generator = random.Random(0)
    vocabulary = SHAPES[options.shape]["vocab"]
    lengths = [generator.randint(options.length // 4, options.length) for _ in range(options.prompts)]
    prompts = [tuple(generator.randrange(vocabulary) for _ in range(length)) for length in lengths]
    requests = [Request(number, prompt, options.tokens) for number, prompt in enumerate(prompts)]
    peer = make_model(options.shape, torch.bfloat16 if precision == "bf16" else torch.float32, device)
    synchronize(device)
    say("their model made")
    spread = [layout for layout in options.layouts if layout != "dp=1"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        # Ranks in other processes read the weights; in this one they are copied.
        peer.save_pretrained(folder) if spread else peer.config.save_pretrained(folder)
        model = model_of(Path(folder))

        def spec(layout: str) -> GenerationSpec:
            wanted = parse_layout(layout)
            return GenerationSpec(
                model=model,
                layout=wanted,
                weights=f"hf:{folder}",
                precision=precision,
                device=options.device,
                backend=options.backend,
                slots=-(-options.prompts // wanted.dp),
                length=max(lengths) + options.tokens,
                chunk=2048 if options.device == "cuda" else 512,
            )

        one = spec("dp=1")
        alone = make_generator(one, 0, device, peer.state_dict())
        synchronize(device)
        say("our model made")
        planned = cache_bytes(model, one.layout, model.layers, one.slots, one.length, 2 if precision == "bf16" else 4)
        assert alone.cache_bytes == planned, (alone.cache_bytes, planned)
        best: dict[str, Timing] = {}
        for turn in range(options.repeats + 1):  # the first warms up
            for name, measure in (
                ("transformers", lambda: theirs(peer, prompts, options.tokens, device)),
                ("cuboid dp=1", lambda: ours(alone, requests)),
            ):
                timing = measure()
                say(f"{name}, turn {turn}: {timing['seconds']:.3f} s, first token {timing['first_token']:.3f} s")
                if turn and (name not in best or timing["seconds"] < best[name]["seconds"]):
                    best[name] = timing
        if spread:
            with Pool() as pool:
                for layout in spread:
                    best[f"cuboid {layout}"] = on_ranks(pool, spec(layout), requests, options.repeats)
    reference = best["transformers"]
    total = options.prompts * options.tokens
    for name, timing in best.items():
        row = {
            "who": name,
            "tokens_per_second": round(total / timing["seconds"], 1),
            "times": round(reference["seconds"] / timing["seconds"], 2),
            "first_token_seconds": round(timing["first_token"], 4),
            "token_seconds": round((timing["seconds"] - timing["first_token"]) / max(1, options.tokens - 1), 5),
            "same_tokens": round(same_tokens(timing["texts"], reference["texts"]), 4),
        }
        print(json.dumps(row | ({"cache_bytes": planned} if name == "cuboid dp=1" else {})), flush=True)
        assert precision == "bf16" or row["same_tokens"] == 1, "in float32 both write the same"


if __name__ == "__main__":
    main()
