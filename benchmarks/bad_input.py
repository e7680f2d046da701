"""Does bad input ever do harm? python benchmarks/bad_input.py --cases 5000 [--jobs 12 --minutes 9] [--seed 0]
                                           [--only 0:17,23] [--verb train] [--out FOLDER]

Generated and mutated inputs against every verb of the command line: files of every kind broken in one place or replaced
by what is no file, junk in options, `--set` values, paths and URLs. A case is bad if it ends in a traceback, by a
signal or with an exit code that does not fit, takes more than LONGEST seconds of CPU or MOST bytes of memory, changes
the folder after a refusal, or refuses in more than a sentence. Exit code 1 if any is. Workers have imported everything
once and fork a process per case. What is bad is told as it is found; the last table says which places that read files
were reached. Formats whose library is not installed are named.

Cases write in the campaign's own folder and in /dev/shm, and nowhere else: the kernel (Landlock) holds them to it, and
takes the rights of root from them. Where it cannot, root is refused, and an ordinary user is told."""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import resource
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", NO_COLOR="1", COLUMNS="100")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA cannot start in a fork, nor within a bound on addresses

sys.path.insert(0, str(Path(__file__).parent))

from confined import confine, why_not_confined
from damage import damage
from good_input import SCENARIOS, make_good, status_of
from junk import word

from cuboid.cli.main import VERBS, _application, module_of
from cuboid.spec.coding import field_types, unwrap_optional
from cuboid.spec.run import Run

LONGEST, PATIENCE, STARVED = 20.0, 45.0, 20.0
"""Seconds of CPU, and of the clock; beyond these a process has hung unless it computes a twentieth of the time, as it
does where others have the cores."""
MOST = 2 << 30
RESERVED = 12 << 30
"""Bytes of addresses a process may have beyond those of the workers: what asks for more would not fit into memory."""
WORDY = 1200
"""Characters of a sentence that nobody reads to its end."""
DAMAGED = {"checkpoint": 1, "data": 1, "verify": 1, "replay": 1, "probe": 1, "models": 0}
"""Verb -> the exit code beside 0 and 2 that it has a use for: something is damaged, or a proof failed."""

KEPT = "built.partial"
"""The finished parts of `data build`, which stay after an error in the middle for the next attempt to continue with."""

APART = {
    "--serve",
    "--rendezvous",
    "--nodes",
    "--help",
    "--host",
    "--port",
    "--interface",
    "--times",
    "--seconds",
    "--inject",
}
"""Options that begin something that lasts, and none of whose values is a file's or a table's."""


@dataclass
class Case:
    number: int
    scenario: int
    arguments: list[str]
    what: str
    """How the input is bad, in a word or two."""
    file: str = ""
    """The file that is broken."""


@dataclass
class Ended:
    case: Case
    code: int
    seconds: float
    processor: float
    memory: int
    faults: list[str] = field(default_factory=list)
    said: str = ""
    places: list[str] = field(default_factory=list)
    """Where files were read."""


# From a number to a bad input.


@cache
def _options(verb: str) -> list[str]:
    """The options of a verb that take a value, as its parser has them."""
    parser: Any = _application(verb)
    import typer

    command = typer.main.get_command(parser).commands[verb]  # type: ignore[attr-defined]
    named = [parameter for parameter in command.params if parameter.opts[0].startswith("-")]
    return [max(parameter.opts, key=len) for parameter in named if not getattr(parameter, "is_flag", False)]


def _fields(types: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, hint in types.items():
        inner, _ = unwrap_optional(hint)
        if is_dataclass(inner):
            yield from _fields(field_types(inner), f"{prefix}{name}.")
        yield prefix + name


def make_case(seed: int, number: int, scenarios: list[int], folder: Path) -> Case:
    """Breaks something in a copy of the good folder, or in the command."""
    random = Random(f"{seed}:{number}")
    scenario = scenarios[number % len(scenarios)]
    command, patterns = SCENARIOS[scenario]
    arguments = shlex.split(command.replace("PORT", str(random.randrange(20_000, 30_000))))
    case = Case(number, scenario, arguments, "")
    options = sorted(set(_options(arguments[0])) - APART)
    ways = (
        ["file"] * 6 * bool(patterns) + ["option"] * 3 * bool(options) + ["set"] * 2 * ("--set" in options) + ["path"]
    )
    ways = ways * 3 + ["closed"]
    way = random.choice(ways)
    if way == "file":
        found = sorted(folder.glob(random.choice(patterns)))
        path = random.choice([path for path in found if path.is_file()])
        case.file = str(path.relative_to(folder))
        case.what = damage(path, random)
    elif way == "option":
        option = random.choice(options)
        case.what, case.arguments = option, [*arguments, option, word(random)]
    elif way == "set":
        name = random.choice(list(_fields(field_types(Run))))
        case.what, case.arguments = "--set", [*arguments, "--set", f"{name}={word(random)}"]
    elif way == "closed":
        found = [path for path in sorted(folder.rglob("*")) if path.is_dir()]
        path = random.choice([folder, *found])
        case.file, case.what = str(path.relative_to(folder)), "closed"
        path.chmod(0o555 if path == folder else random.choice((0o555, 0o555, 0o333, 0)))
    else:
        place = random.randrange(1, max(2, len(arguments)))
        case.what, case.arguments = "argument", [*arguments[:place], word(random), *arguments[place + 1 :]]
    return case


# One case: a process, watched.


def _listing(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        kind = stat.filemode(facts.st_mode)[0]
        content = ""
        if kind == "-" and facts.st_size < 64 << 20:
            with suppress(PermissionError):
                content = hashlib.sha1(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = f"{kind}{facts.st_size if kind == '-' else ''} {content}"
    return found


def _read_places(found: set[str], root: str) -> Any:
    """Notes who opens files: the first frame of the program outside of its readers."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(root) and not name.endswith("/readers.py"):
                found.add(f"{name.removeprefix(root)}:{frame.f_code.co_name}")
                return
            if "importlib" in name or name.endswith("linecache.py"):
                return
            frame = frame.f_back  # type: ignore[assignment]

    return hear


def _end_with_parent() -> None:
    """Also when that one is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _become(case: Case, folder: Path, beside: Path) -> None:
    """The child: ends with the case."""
    _end_with_parent()
    os.setsid()
    os.chdir(folder)
    for number, name, flags in (
        (0, "/dev/null", os.O_RDONLY),
        (1, "out", os.O_WRONLY | os.O_CREAT),
        (2, "err", os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(beside / name if number else name, flags | os.O_TRUNC * bool(number)), number)
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (addresses + RESERVED, addresses + RESERVED))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, 4 << 30))
    found: set[str] = set()
    sys.addaudithook(_read_places(found, str(Path(importlib.import_module("cuboid").__file__ or "").parent) + "/"))
    status = status_of(case.arguments)
    (beside / "places").write_text(json.dumps(sorted(found)))
    os._exit(status)


def _tree(process: int) -> list[int]:
    found = [process]
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                found += _tree(int(child))
    return found


def _used(process: int) -> tuple[int, float]:
    """Bytes that a process and its children hold, and their seconds of CPU."""
    memory, processor = 0, 0.0
    for each in _tree(process):
        with suppress(OSError, IndexError):
            memory += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * resource.getpagesize()
            times = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]
            processor += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return memory, processor


def _patience(processor: float) -> float:
    return max(PATIENCE, STARVED * processor)


def run_case(case: Case, folder: Path, beside: Path) -> Ended:
    before = _listing(folder)
    for name in ("out", "err", "places"):
        (beside / name).unlink(missing_ok=True)
    begun, memory, processor = time.monotonic(), 0, 0.0
    child = os.fork()
    if not child:
        try:
            _become(case, folder, beside)
        finally:
            os._exit(72)
    faults, ended, accepted, wait = [], None, False, 0.005
    while ended is None:
        time.sleep(wait)
        wait = min(wait * 1.3, 0.1)
        done, ended_as, used = os.wait4(child, os.WNOHANG)
        if done:
            ended = os.waitstatus_to_exitcode(ended_as)
            memory, processor = max(memory, used.ru_maxrss << 10), max(processor, used.ru_utime + used.ru_stime)
            break
        held, spent = _used(child)
        memory, processor = max(memory, held), max(processor, spent)
        working = "train" in case.arguments and b"\nstep " in (beside / "out").read_bytes() if processor > 5 else False
        if working:  # nothing was wrong with it
            accepted = True
        elif memory <= 1.5 * MOST and processor <= LONGEST and time.monotonic() - begun <= _patience(processor):
            continue
        for each in reversed(_tree(child)):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        os.waitpid(child, 0)
        ended = 0 if accepted else -9
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    seconds = time.monotonic() - begun
    said = (beside / "err").read_text(errors="replace") if (beside / "err").exists() else ""
    verb = case.arguments[0]
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if memory > MOST:
        faults.append(f"{memory / 2**30:.1f} GiB")
    if processor > LONGEST or seconds > _patience(processor):
        faults.append(f"hang ({processor:.0f} s of CPU, {seconds:.0f} s)")
    if "Traceback (most recent call last)" in said or "panicked at" in said or "Fatal Python error" in said:
        faults.append("traceback")
    elif ended not in (0, 2, DAMAGED.get(verb, 2)) and not faults:
        faults.append(f"exit code {ended}")
    if ended == 2:
        after = {name: facts for name, facts in _listing(folder).items() if not name.startswith(KEPT)}
        if after != before:
            faults.append("wrote after a refusal")
        if len(errors) != 1 or len(said) - len(errors[0]) > WORDY or len(errors[0]) > WORDY:
            faults.append("not one sentence")
    places = json.loads((beside / "places").read_text()) if (beside / "places").exists() else []
    return Ended(case, ended, round(seconds, 2), round(processor, 2), memory, faults, said[-6000:], places)


# Many cases.


def _work(
    asked: argparse.Namespace, numbers: list[int], scenarios: list[int], good: Path, room: Path, out: int
) -> None:
    until = time.monotonic() + 60 * asked.minutes
    if not why_not_confined():
        confine([room])
    for number in numbers:
        if time.monotonic() > until:
            return
        folder, beside = room / "case", room
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        case = make_case(asked.seed, number, scenarios, folder)
        ended = run_case(case, folder, beside)
        if case.what == "closed":
            for above, names, _ in os.walk(folder):  # from the top: also what is a copy of the closed one
                for name in names:
                    if not os.path.islink(f"{above}/{name}"):
                        os.chmod(f"{above}/{name}", 0o755)
            folder.chmod(0o755)
        os.write(out, (json.dumps(asdict(ended)) + "\n").encode())


def _at_home(room: Path) -> None:
    """What is kept for a user, or for a moment, is kept here."""
    os.environ.update({name: str(room) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")})
    tempfile.tempdir = str(room)


def _import_everything() -> None:
    for module in pkgutil.walk_packages(importlib.import_module("cuboid").__path__, "cuboid."):
        if module.name == "cuboid.launch.preload":  # of fork servers: it makes this process end with exit code 0
            continue
        with suppress(ImportError):
            importlib.import_module(module.name)
    for name in ("pyarrow.parquet", "tokenizers", "safetensors.torch", "fsspec", "zstandard", "aiohttp"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not tried: what needs {name}, because {error}", file=sys.stderr, flush=True)
    for verb in VERBS:
        importlib.import_module(f"cuboid.cli.{module_of(verb)}")


def _has_files(folder: Path, patterns: tuple[str, ...]) -> bool:
    """Not where a library that makes them is not installed."""
    return all(any(path.is_file() for path in folder.glob(pattern)) for pattern in patterns)


class _Lines:
    """Of a file that another process writes."""

    def __init__(self, path: Path) -> None:
        self.path, self._rest = path, b""
        path.touch()
        self._file = path.open("rb")

    def new(self) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [json.loads(line) for line in lines]


def campaign(asked: argparse.Namespace, numbers: list[int], scenarios: list[int], room: Path) -> list[dict[str, Any]]:
    good = room / "good"
    good.mkdir()
    if reason := why_not_confined():
        if os.geteuid() == 0:
            raise SystemExit(f"{reason}; start this as an ordinary user")
        print(f"not confined: {reason}", file=sys.stderr)
    _import_everything()
    gc.collect()
    gc.freeze()
    make_good(good)
    os.chdir(room)
    scenarios = [number for number in scenarios if _has_files(good, SCENARIOS[number][1])]
    jobs = min(asked.jobs, len(numbers))
    children, files = [], [_Lines(room / f"results-{worker}") for worker in range(jobs)]
    for worker in range(jobs):
        (room / f"worker-{worker}").mkdir()
        child = os.fork()
        if not child:
            code = 1
            _end_with_parent()
            try:
                out = os.open(files[worker].path, os.O_WRONLY)
                _at_home(room / f"worker-{worker}")
                _work(asked, numbers[worker::jobs], scenarios, good, room / f"worker-{worker}", out)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    found: list[dict[str, Any]] = []
    failed = False
    while children:
        time.sleep(0.5)
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                children.remove(child)
                failed = failed or status != 0
        for file in files:
            for ended in file.new():
                found.append(ended)
                _tell(ended, len(found), len(numbers), asked)
    if failed:
        raise SystemExit("a worker failed")
    return sorted(found, key=lambda ended: int(ended["case"]["number"]))


def _tell(ended: dict[str, Any], done: int, cases: int, asked: argparse.Namespace) -> None:
    if asked.out:
        with asked.out.open("a") as file:
            file.write(json.dumps(ended) + "\n")
    if not asked.json and ended["faults"]:
        case = ended["case"]
        print(f"{asked.seed}:{case['number']}  {'; '.join(ended['faults'])}  {case['what']} {case['file']}")
        print(f"    cuboid {shlex.join(case['arguments'])[:300]!r}")
        print(f"    {(ended['said'].strip().splitlines() or [''])[-1][:300]}", flush=True)
    if done % 100 == 0:
        print(f"{done} of {cases} cases", file=sys.stderr, flush=True)


def show(found: list[dict[str, Any]], seed: int) -> None:
    table: dict[tuple[str, str], Counter[str]] = {}
    for ended in found:
        case = ended["case"]
        kind = "option" if case["what"].startswith("--") and case["what"] != "--set" else case["what"]
        row = table.setdefault((SCENARIOS[case["scenario"]][0].split()[0], kind), Counter())
        row["bad" if ended["faults"] else {0: "worked", 2: "refused"}.get(ended["code"], "damaged")] += 1
    names = ("refused", "worked", "damaged", "bad")
    print(f"\n{'verb':<18}{'kind':<14}" + "".join(f"{name:>10}" for name in names))
    for (verb, kind), row in sorted(table.items()):
        print(f"{verb:<18}{kind:<14}" + "".join(f"{row[name] or '·':>10}" for name in names))
    places = Counter(place for ended in found for place in ended["places"])
    print(f"\n{len(places)} places read files:")
    print("  " + "\n  ".join(f"{count:>6} {place}" for place, count in sorted(places.items())))
    slow = max(found, key=lambda ended: ended["processor"])
    full = max(found, key=lambda ended: ended["memory"])
    bad = sum(bool(ended["faults"]) for ended in found)
    print(
        f"\n{len(found)} cases, {bad} bad; at most {slow['processor']:.1f} s of CPU ({seed}:{slow['case']['number']}) "
        f"and {full['memory'] / 2**30:.2f} GiB ({seed}:{full['case']['number']})"
    )


def command() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="SEED:NUMBER,… of single cases, with all they say")
    parser.add_argument("--verb", help="only this verb; numbers of cases are then others")
    parser.add_argument("--jobs", type=int, default=2, help="so many cases at once")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further case begins")
    parser.add_argument("--out", type=Path, help="a folder for bad_input.jsonl: a row a case, as it ends")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    scenarios = [index for index, (text, _) in enumerate(SCENARIOS) if asked.verb in (None, text.split()[0])]
    numbers = list(range(asked.cases))
    if asked.only:
        seed, _, wanted = asked.only.partition(":")
        asked.seed, numbers = int(seed), [int(number) for number in wanted.split(",")]
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        asked.out = (asked.out / "bad_input.jsonl").resolve()
    with TemporaryDirectory(prefix="bad-input-") as room:
        found = campaign(asked, numbers, scenarios, Path(room))
    if asked.json:
        print(json.dumps({"seed": asked.seed, "cases": found}))
    else:
        if asked.only:
            print("\n".join(ended["said"] for ended in found))
        show(found, asked.seed)
    return int(any(ended["faults"] for ended in found))


if __name__ == "__main__":
    sys.exit(command())
