"""`cuboid evaluate RUN --harness TASKS`: tasks of lm-evaluation-harness, an optional extra."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cuboid.errors import UserError
from cuboid.spec.layout import Layout


def evaluate_tasks(
    target: Any,
    layout: Layout,
    tasks: list[str],
    *,
    folder: Path | None,
    limit: int | None,
    shots: int | None,
    batch: int,
    precision: str | None,
    device: str,
    backend: str,
) -> dict[str, Any]:
    """The harness's results, by task."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("--harness needs lm-evaluation-harness; pip install 'cuboid[harness]'") from None
    from cuboid.launch.harness import CuboidModel

    if folder is not None and not folder.is_dir():
        raise UserError(f"tasks={folder} is no folder; name one with tasks as YAML")
    # The thousands that the harness brings are read only where they are asked for.
    manager = TaskManager(include_path=folder and str(folder), include_defaults=False) if folder else None
    if manager is None or set(tasks) - set(manager.all_tasks):
        manager = TaskManager(include_path=folder and str(folder))
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        raise UserError(f"harness={unknown[0]} is no task that lm_eval knows; lm-eval ls tasks shows them")
    model = CuboidModel(target, layout, batch, precision, device, backend)
    try:
        found = simple_evaluate(model, tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager)
    except (OSError, ConnectionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the data of harness={','.join(tasks)} cannot be read: {reason}") from None
    results: dict[str, Any] = json.loads(json.dumps(found["results"], default=str))
    return results


def table(results: dict[str, Any]) -> str:
    rows = []
    for task, measured in results.items():
        for name, value in measured.items():
            if isinstance(value, float) and "_stderr" not in name:
                error = measured.get(name.replace(",", "_stderr,", 1))
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                rows.append(f"{task}: {name.split(',')[0]} {value:.4f}{spread}")
    return "\n".join(rows)
