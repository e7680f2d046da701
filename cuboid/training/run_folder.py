"""The folder of a run: what it holds, that it never holds two runs, and the files of rows in it."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuboid.checkpoint.folder import checkpoints, clear, newest_whole, require_checkpoints, step_of
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import MANIFEST, parse_run, run_of
from cuboid.checkpoint.memory.folder import IDENTITY, forget, identity_of, newest_in_memory, write_identity
from cuboid.checkpoint.owner import Owner, check_writable, look, own
from cuboid.checkpoint.terms import PATTERN as LEADERS
from cuboid.checkpoint.verify import require_state
from cuboid.console import say
from cuboid.data.opened import same_data
from cuboid.errors import UserError
from cuboid.outputs import check_appendable, check_way
from cuboid.readers import Missing, Unreadable, open_plain, read_text
from cuboid.secure_channel import NAME as SECRET
from cuboid.spec.run import Run, dump_run, load_run
from cuboid.strict_json import json_text
from cuboid.telemetry.rows import metric_rows
from cuboid.training.learning_rate import tell_change

RUN_FILE = "run.toml"
BACKEND = "backend.json"
"""What carries the collectives, on how many GPUs; written by rank 0 when all have joined."""
EXPERTS = "experts.jsonl"
"""The load of every expert of a mixture, over time."""
# What a run writes here, and `--overwrite` may therefore remove; nothing else in the folder is touched.
WRITTEN = (
    BACKEND,
    IDENTITY,
    SECRET,
    LEADERS,
    "metrics.jsonl",
    EXPERTS,
    "timing-*.jsonl",
    "communication-*.jsonl",
    "memory-*.jsonl",
    "failures.jsonl",
    "fault-*.json",
    "hang-*",
    "flight-*",
    "goodput.json",
    "ranks-*.jsonl",
    "bad_steps.jsonl",
    "tracked.jsonl",
    "samples.jsonl",
    "profile",
)
ISLANDS_MAY_CHANGE = ("count", "quorum", "grace_seconds", "batch_weights", "rate", "ramp_rate")
"""Settings of islands with which a run may resume: how many there are, and learning rates, as those of a run."""
MAY_CHANGE_TOLD = ("gradient_clip", "z_loss", "prediction_loss", "dropout", "fp8_scaling", "fp8_experts", "loss_scale")
"""Settings of `training` that decide what is computed, and with which a run may resume all the same: it says so."""
UNSEEN = (IDENTITY, SECRET, LEADERS)
"""Of these, what a run may leave behind that never began."""
CONTINUED = ("metrics.jsonl", EXPERTS, "timing-*.jsonl", "tracked.jsonl")
"""Of these, what has rows of which a resumed run keeps the first."""
REPORTS = "failure-*.txt"


def checkpoint_folder(run: Run) -> Location:
    return locate(run.checkpoint.folder or Path(run.output.folder) / "checkpoints")


def newest_kept(run: Run) -> int:
    """Steps of the newest state there is to continue from, on disk or in this node's memory."""
    on_disk = max((step_of(path) for path in checkpoints(checkpoint_folder(run))), default=0)
    return max(on_disk, newest_in_memory(run))


def last_row(run: Run) -> int:
    """The last step that the run's own rows tell of."""
    return last_step(Path(run.output.folder) / "metrics.jsonl")


def check_same_training(old: Run, new: Run, owner: str = "") -> None:
    """To continue, layout, length, learning rate and output may change; what decides the numbers computed may not.
    `owner`: another run, of which this is the training only if the learning rate is the same too."""
    fixed = {
        "training.global_batch": (old.training.global_batch, new.training.global_batch),
        "training.batch_ramp": (old.training.batch_ramp, new.training.batch_ramp),
        "training.sequence": (old.training.sequence, new.training.sequence),
        "training.sequence_ramp": (old.training.sequence_ramp, new.training.sequence_ramp),
        "training.seed": (old.training.seed, new.training.seed),
        "training.start_from": (old.training.start_from, new.training.start_from),
        "training.precision": (old.training.precision, new.training.precision),
        "training.gradient_sums": (old.training.gradient_sums, new.training.gradient_sums),
        "model": (old.model, new.model),
        "data": (old.data, new.data),
        "optimizer": (old.optimizer, new.optimizer),
    }
    if 1 not in (old.islands.count, new.islands.count):  # of one island these settings change nothing
        fixed |= {
            f"islands.{name}": (value, vars(new.islands)[name])
            for name, value in vars(old.islands).items()
            if name not in ISLANDS_MAY_CHANGE
        }
    if owner:
        rates = (vars(old.learning_rate), vars(new.learning_rate))
        fixed |= {f"learning_rate.{name}": (rates[0][name], rates[1][name]) for name in rates[1]}
        fixed["training.gradient_clip"] = (old.training.gradient_clip, new.training.gradient_clip)
        fixed["training.z_loss"] = (old.training.z_loss, new.training.z_loss)
        fixed["training.prediction_loss"] = (old.training.prediction_loss, new.training.prediction_loss)
        fixed["training.dropout"] = (old.training.dropout, new.training.dropout)
    # The first that differs is refused: one sentence, one setting to change.
    for name, (before, now) in fixed.items():
        if before != now:
            simple = isinstance(now, float | int | str)
            if owner:
                pair = f"{name}={now} is not its {before}" if simple else f"{name} is not its"
                raise UserError(
                    f"checkpoint.folder={checkpoint_folder(new)} is that of {owner}, and {pair}; use "
                    "another checkpoint.folder, the output.folder of that run to change it, training.start_from for "
                    "its weights alone, or --take-over to resume it as it is given here"
                )
            pair = f"{name}={now} is not {before}," if simple else f"{name} is not that"
            raise UserError(
                f"{pair} of the run in {new.output.folder}; use the same {name}, another output.folder, or --overwrite "
                f"to start anew"
            )


def as_begun(run: Run) -> tuple[Run, str]:
    """The run with router noise where the training that it continues has it, and what there is to say of it. Runs from
    before `noise_on` have noise on logits, and their files need not say so."""
    mixture = run.model.mixture
    if mixture is None or mixture.scoring == "softmax" or not mixture.router_noise:
        return run, ""
    path = Path(run.output.folder) / RUN_FILE
    found, manifest, _ = newest_whole(checkpoint_folder(run), contents=False)
    if manifest is None and not path.exists():
        return run, ""
    begun = (load_run(path) if found is None or manifest is None else run_of(found, manifest)).model.mixture
    if begun is None or begun.noise_on == mixture.noise_on:
        return run, ""
    said = f"the run continues with model.mixture.noise_on={begun.noise_on}, as it began"
    return replace(run, model=replace(run.model, mixture=replace(mixture, noise_on=begun.noise_on))), said


def prepare_folder(run: Run, overwrite: bool = False, take_over: bool = False) -> str:
    """Claim the run's folder before any process starts. Another training there is refused by name, the same one goes
    on; returns what there is to say of its past. `take_over`: checkpoints of another run become this one's."""
    folder = Path(run.output.folder)
    said, claim = "", None
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"output.folder={folder} is a file; use the name of a folder")
        identity_of(run)  # refused here where it is none
        claims, owner = look(checkpoint_folder(run))
        other = None if take_over else _other_owner(run, owner)
        if overwrite:
            _check_cleared(run, other)
        else:
            said = _check_past(run, folder, other, claims.names[0] if claims.names else MANIFEST)
        _check_own_file(folder)
        require_checkpoints(checkpoint_folder(run))
        check_writable(run, checkpoint_folder(run))
        claim = own(run, checkpoint_folder(run), claims, anew=overwrite)
        if overwrite:
            _clear(run, folder)
        else:
            forget_reports(run)
        # Copies in memory of an earlier run would never be read again, and nobody else gives them back.
        if overwrite or not run.checkpoint.memory_every:
            forget(run)
        folder.mkdir(parents=True, exist_ok=True)
        _write_run(run, folder)
        if claim is not None:
            write_identity(run, claim.identity)
            claim.keep()
    except BaseException as error:
        if claim is not None:
            claim.withdraw()
        if not isinstance(error, OSError):
            raise
        raise UserError(f"output.folder={folder} cannot be written: {error.strerror}; use another folder") from None
    return said


def check_folders(run: Run) -> None:
    """No store that ends with a process, no way through a folder that is not there."""
    for name, told in (("output", run.output.folder), ("checkpoint", run.checkpoint.folder)):
        protocol, _, path = told.rpartition("://")
        if protocol == "memory":
            raise UserError(
                f"{name}.folder={told} is the memory of one process and ends with it; use a path, a store such as "
                "s3://bucket/folder, or checkpoint.memory_every"
            )
        if protocol in ("file", "local"):
            check_way(f"{name}.folder={protocol}://", path)
        elif not protocol:
            check_way(f"{name}.folder=", path)


def _write_run(run: Run, folder: Path) -> None:
    """By a rename: who reads the folder meanwhile finds the old run file or the new one."""
    aside = folder / f".{RUN_FILE}.{os.getpid()}"
    try:
        aside.write_bytes(dump_run(run).encode())
        os.replace(aside, folder / RUN_FILE)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def _check_own_file(folder: Path) -> None:
    """Refuse to write over a run file that a person keeps there: a run writes its own without comments, and rows."""
    path = folder / RUN_FILE
    if path.is_dir():
        raise UserError(f"{path} is a folder, and a run's file must be there; remove it, or use another folder")
    if not path.exists() or (folder / "metrics.jsonl").exists():
        return
    with suppress(UserError):
        if _written_by_a_run(read_text(path), dump_run(load_run(path))):
            return
    raise UserError(
        f"output.folder={folder} holds a {RUN_FILE} that no run has written, and this one would write over it; use "
        "another folder, or rename that file"
    )


def _written_by_a_run(text: str, today: str) -> bool:
    """`today`: what a run of today writes for the same values. Older runs wrote the same lines without those of newer
    keys. A person writes few of them, or others."""
    own, lines = text.splitlines(), today.splitlines()
    rest = iter(lines)
    return 2 * len(own) > len(lines) and all(line in rest for line in own)


def require_folder(run: Run) -> None:
    """In rank 0, while it sets up: refuse to train in a new folder, which would not say what run it is of."""
    folder = Path(run.output.folder)
    if not _is_there(folder / RUN_FILE):
        raise UserError(f"output.folder={folder} was removed, or unmounted, before a step was done; use one that stays")


def forget_reports(run: Run) -> None:
    """What ended the run before is not what ends it now."""
    _remove(Path(run.output.folder), REPORTS)


def _other_owner(run: Run, owner: Owner | None) -> Owner | None:
    """The run whose checkpoints lie in this one's folder, if it is another; with checkpoints from before runs said
    so, one with another output folder. `owner`: as the folder has it."""
    place = checkpoint_folder(run)
    if owner is not None:
        return owner if owner.identity != identity_of(run) else None
    found, manifest, _ = newest_whole(place, contents=False)
    if found is None or manifest is None or not run.checkpoint.folder:
        return None
    wrote = run_of(found, manifest)
    # Names are relative to where a run was started: the same name may be of another place.
    told = wrote.checkpoint.folder
    same_place = _is_own_place(run) or (told and os.path.realpath(told) == os.path.realpath(run.checkpoint.folder))
    same_place = same_place or told == run.checkpoint.folder  # of a store
    if wrote.output.folder == run.output.folder and same_place:
        return None
    return Owner("", wrote.output.folder, "", manifest.run)


def _is_own_place(run: Run) -> bool:
    """Whether `checkpoint.folder` names the folder that is this run's without that."""
    return os.path.realpath(run.checkpoint.folder) == os.path.realpath(Path(run.output.folder) / "checkpoints")


def _check_past(run: Run, folder: Path, other: Owner | None, written: str) -> str:
    """Refuse what the folder, or the checkpoints there are, cannot continue with. `other`: the run they are of.
    `written`: the file that says so."""
    known, finished = (folder / RUN_FILE).exists(), False
    if known:
        before = load_run(folder / RUN_FILE)
        check_same_training(before, run)
        _check_logs(folder)
        finished = last_row(run) >= before.training.steps
    elif folder.exists():
        _require_run_file(folder, CONTINUED)
    if other is not None:
        check_same_training(parse_run(checkpoint_folder(run), written, other.run), run, other.named)
    # Names and sizes only, because the ranks compare checksums as they read; but of a finished run, which would have to
    # begin anew where no checkpoint is whole, they must not be the first to see that.
    found, manifest, _ = newest_whole(checkpoint_folder(run), contents=finished)
    if found is None or manifest is None:
        if newest_in_memory(run) or not known:
            return ""
        _keep_finished(load_run(folder / RUN_FILE), run)
        return f"{folder} has no whole checkpoint: starting anew from step 0"
    saved = run_of(found, manifest)
    check_same_training(saved, run)
    if saved.optimizer.kind == "adamw" and not saved.optimizer.is_own:
        require_state(found, ("parameter", "exp_avg", "exp_avg_sq"))
    # The cursor in a checkpoint counts samples; of other data it would point at something else.
    if not same_data(run, manifest.data):
        sources = ", ".join(run.data.sources)
        raise UserError(
            f"data.source={sources} holds other samples than it did when step {manifest.step} was saved in "
            f"{checkpoint_folder(run)}; use the same data, another output.folder, or --overwrite"
        )
    told = [f"resuming {other.named}"] if other is not None else []
    return "; ".join([*told, *filter(None, [tell_change(saved, run, manifest.step), _tell_settings(saved, run)])])


def _tell_settings(old: Run, new: Run) -> str:
    """What the run computes otherwise from now on."""
    pairs = {f"training.{name}": (vars(old.training)[name], vars(new.training)[name]) for name in MAY_CHANGE_TOLD}
    if 1 not in (old.islands.count, new.islands.count):
        for name in ("rate", "ramp_rate", "count"):
            pairs[f"islands.{name}"] = vars(old.islands)[name], vars(new.islands)[name]
    changed = [f"{name}={now} (was {before})" for name, (before, now) in pairs.items() if before != now]
    return f"{', '.join(changed)} from the next step on" if changed else ""


def _check_logs(folder: Path) -> None:
    """Ranks continue what is there: damage, what is no file at all, and what nobody may append to, is said before they
    start."""
    for path in sorted(folder.iterdir()):
        if any(path.match(pattern) for pattern in CONTINUED):
            metric_rows(path)
        elif path.suffix in (".json", ".jsonl") and any(path.match(pattern) for pattern in WRITTEN):
            with suppress(Missing):  # a link to nowhere, where a file will be
                open_plain(path, "remove it").close()
                if path.suffix == ".jsonl":
                    check_appendable(path)


def _keep_finished(old: Run, new: Run) -> None:
    """Of a finished run whose folder has nothing to resume from, training again would drop every row."""
    done = last_row(new)
    if done >= old.training.steps:
        raise UserError(
            f"output.folder={new.output.folder} holds a run that finished its {done} steps, and no checkpoint to "
            f"resume from; use another output.folder, or --overwrite to train it anew"
        )


def _check_cleared(run: Run, other: Owner | None) -> None:
    place = checkpoint_folder(run)
    if other is not None and checkpoints(place) and other.folder != os.path.abspath(run.output.folder):
        raise UserError(
            f"checkpoint.folder={place} is that of {other.named}, whose checkpoints --overwrite would remove; use "
            "another checkpoint.folder, or --take-over too"
        )
    folder = Path(run.output.folder)
    if not (folder / RUN_FILE).exists():
        _require_run_file(folder, tuple(pattern for pattern in WRITTEN if pattern not in UNSEEN))
    kept = Path(run.checkpoint.folder or folder / "checkpoints") if "://" not in run.checkpoint.folder else folder
    written = [path for pattern in WRITTEN for path in folder.glob(pattern) if path.is_dir() and not path.is_symlink()]
    for path in (kept, *written):
        if path != folder and path.is_dir():
            for above, _, _ in os.walk(path, onerror=_not_listed):
                if not os.access(above, os.R_OK | os.W_OK | os.X_OK):  # half of a run would be gone
                    raise _not_removed(above, "Permission denied")


def _require_run_file(folder: Path, patterns: tuple[str, ...]) -> None:
    """Refuse files under names of a run's own where no run says that it has written them."""
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        raise UserError(
            f"output.folder={folder} has {path.name} and no {RUN_FILE}, so that it may not be a run's to overwrite; "
            "remove it, or use another folder"
        )


def _not_listed(problem: OSError) -> None:
    """`os.walk` passes over folders that it cannot list."""
    raise _not_removed(problem.filename, problem.strerror)


def _not_removed(folder: str, reason: str | None) -> UserError:
    return UserError(f"{folder} cannot be removed: {reason}; change its mode, or use another folder")


def _clear(run: Run, folder: Path) -> None:
    place = checkpoint_folder(run)
    for pattern in (*WRITTEN, REPORTS) if (folder / RUN_FILE).exists() else (IDENTITY, LEADERS):
        _remove(folder, pattern)
    clear(place)


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class Rows:
    """A file of JSON rows, one per step, that survives its writer being killed and its disk being full."""

    def __init__(self, path: Path, done: int = 0) -> None:
        """Rows of the first `done` steps are kept; those of steps that will be done again are dropped."""
        self._path = path
        self._waiting = b""
        self._warned = False
        self._of_a_run = (path.parent / RUN_FILE).exists()
        kept = [row for row in metric_rows(path) if row["step"] <= done] if done else []
        _replace(path, kept)
        # Unbuffered: a row is in the file, or at least with the system, before the next step begins.
        self._file = path.open("ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        """What the disk does not take now is tried again with the next row: a full disk does not end a training."""
        self._waiting += _line(row)
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            if self._is_gone(row["step"]):
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
                self._warn(FileNotFoundError(errno.ENOENT, "it was removed, with its rows"))
            else:
                self._warned = False
        except OSError as error:
            self._warn(error)

    def _is_gone(self, step: int) -> bool:
        """Whether the file was removed. Without its folder a run ends: what it writes would be nowhere, or in a new
        folder that does not say what run it is of."""
        if _is_there(self._path):
            return False
        folder = self._path.parent
        if not _is_there(folder) or (self._of_a_run and not _is_there(folder / RUN_FILE)):
            raise UserError(
                f"output.folder={folder} was removed, or unmounted, while the run trained, which ends after step "
                f"{step}; use a folder that stays"
            )
        return True

    def add_to_last(self, name: str, values: list[Any]) -> None:
        """More for a list of the last row, which stands in the file already."""
        # The whole file is written again: only the end of a run and a rollback come here.
        try:
            rows = metric_rows(self._path)
            if rows:
                rows[-1][name] = rows[-1].get(name, []) + values
                _replace(self._path, rows)
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
        except (OSError, Unreadable) as error:
            self._warn(error)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _warn(self, error: OSError | Unreadable) -> None:
        if not self._warned:
            why = error.reason if isinstance(error, Unreadable) else error.strerror or error
            say(f"{self._path} cannot be written: {why}; the training continues", as_warning=True)
        self._warned = True


def _is_there(path: Path) -> bool:
    """An OSError if the file system does not say: it may come back."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def last_step(path: Path) -> int:
    """Of the last whole row; 0 if there is none."""
    rows = metric_rows(path)
    return int(rows[-1]["step"]) if rows else 0


def _line(row: dict[str, Any]) -> bytes:
    return json_text(row).encode() + b"\n"


def _replace(path: Path, rows: list[dict[str, Any]]) -> None:
    """All at once: whoever is killed here leaves the old rows or the new ones."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.write_bytes(b"".join(map(_line, rows)))
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def layer_names(kind: str, count: int) -> list[str]:
    """What the numbers of a kind in `layers` of a row belong to: activations to blocks, the rest to the embedding and
    the head too."""
    if kind == "activation_rms":
        return [str(layer) for layer in range(count)]
    return ["embedding", *(str(layer) for layer in range(count - 2)), "head"][:count]
