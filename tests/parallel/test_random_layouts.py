"""Layouts, models and batches drawn at random: a few on every run, many with --thorough."""

from __future__ import annotations

import random

from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.layout import CONTEXT_METHODS, STAGES_PER_RANK
from cuboid.spec.run import Run
from tests.parallel.cases import assert_equal, small_run

PLAIN = ["tiny-llama", "tiny-qwen3", "tiny-gpt2"]
WINDOWED = ["tiny-gemma3", "tiny-olmo3", "tiny-gpt-oss", "tiny-llama"]


def draw(random_source: random.Random, most: int, models: list[str], *more: str) -> Run:
    """A run on at most `most` ranks; draws again when the rules refuse one."""
    while True:
        pick = random_source.choice
        dp, tp, pp, cp = pick([1, 2, 3, 4]), pick([1, 2, 4]), pick([1, 2, 3, 4]), pick([1, 1, 2, 3, 4])
        if not 1 < dp * tp * pp * cp <= most:
            continue
        schedule = pick(["gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev"])
        parts = [f"dp={dp},tp={tp},pp={pp},zero={pick(range(4))},schedule={schedule}"]
        parts += [f"micro_batch={pick([1, 2])}", f"recompute={pick(['none', 'none', 'selective', 'full'])}"]
        parts += [f"sequence_parallel={pick(['true', 'false'])}"]
        parts += [f"cp={cp},cp_method={pick(CONTEXT_METHODS)}"]
        for name in ("batch_weights", "shard_weights"):
            if dp > 1 and pick([True, False]):
                parts.append(f"{name}={pick([2, 3])}" + ":1" * (dp - 1))
        overrides = [f"model.vocab={pick(range(5, 300))}"]
        vpp = STAGES_PER_RANK[schedule] or 2
        if pp > 1 and pick([True, False]):
            parts.append("layers=" + ":".join(str(pick([1, 1, 2, 3])) for _ in range(pp * vpp)))
        else:
            overrides.append(f"model.layers={pick(range(4, 10))}")
        overrides += [f"model.kv_heads={pick([1, 2, 4, 8])}", f"training.seed={pick(range(1000))}"]
        assigned = pick(["data.assignment=work", "data.assignment=order", "data.attention_within_documents=false"])
        overrides += [assigned]
        overrides += more
        model = pick(models)
        if model == "tiny-gpt2":
            overrides = [override for override in overrides if "kv_heads" not in override]
        try:
            return small_run(",".join(parts), *overrides, model=model, micro_batches=pick([1, 2, 3, 5]))
        except UserError:
            continue


def test_random_layouts_equal_one_device(pool: Pool, thorough: bool) -> None:
    random_source = random.Random(20240607)
    for turn in range(200 if thorough else 4):
        assert_equal(pool, draw(random_source, 16 if turn % 5 == 0 else 8, PLAIN))


def test_random_layouts_with_windows_equal_one_device(pool: Pool, thorough: bool) -> None:
    """Of any length, in any pattern, with sinks or without; experts stay whole on their ranks or are spread."""
    random_source = random.Random(20261118)
    for turn in range(100 if thorough else 3):
        windows = [random_source.choice((0, 1, 2, 3, 5, 9, 30)) for _ in range(random_source.randrange(1, 5))]
        more = [f"model.windows={windows}", f"model.sinks={random_source.choice(('true', 'false'))}"]
        more += ["model.window_rope_theta=0"] * (not any(windows))
        assert_equal(pool, draw(random_source, 16 if turn % 5 == 4 else 8, WINDOWED, *more))
