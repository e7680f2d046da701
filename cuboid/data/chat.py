"""Conversations as the text a model expects, by the chat template of its tokenizer. A tokenizer without one has no way
to write them, and none is made up: a model would learn marks that nobody sends it."""

from __future__ import annotations

import ctypes
import json
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from cuboid.data.tokenizer import BYTES
from cuboid.errors import UserError
from cuboid.readers import Missing, parse_json, read_json, read_text

FILE, CONFIG, KEY = "chat_template.jinja", "tokenizer_config.json", "chat_template"
LARGEST = 1 << 18
"""Characters of a template; the longest there are have some ten thousand, and a megabyte is compiled for seconds."""
LONGEST = 1 << 24
"""Characters of a conversation as it is written."""
SECONDS = 10.0
"""Of a processor that a template may take for one conversation."""
MEMORY = 1 << 30
"""Bytes that it may take beyond those of its process."""
START = "from cuboid.data.chat import answer; answer()"
TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
INSTEAD = "use rows with prompt and completion, or --tokenizer FOLDER with a chat template"


class Runaway(UserError):
    """A template takes what no conversation needs."""

    def __init__(self, template: ChatTemplate, place: str) -> None:
        super().__init__(f"{place}: {template.where} takes for ever, or all memory, on these messages; {INSTEAD}")


@dataclass(frozen=True)
class ChatTemplate:
    where: str
    source: str
    tokens: tuple[tuple[str, str], ...]
    """bos_token and the like, by which templates name special tokens."""

    def turns(self, messages: Sequence[dict[str, Any]], place: str) -> tuple[str, ...]:
        """What comes before each message of the assistant, and that message as the template writes it, in turns. A last
        question without answer teaches nothing."""
        texts: list[str] = []
        written = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._render(messages[:index], place, True)
            answered = self._render(messages[: index + 1], place, False)
            if not (asked.startswith(written) and answered.startswith(asked)):
                raise UserError(
                    f"{place}: {self.where} writes earlier messages anew when message {index + 1} follows, so what is "
                    "to be learned has no place; use rows with prompt and completion"
                )
            texts += [asked[len(written) :], answered[len(asked) :]]
            written = answered
        return tuple(texts)

    def _render(self, messages: Sequence[dict[str, Any]], place: str, asks: bool) -> str:
        try:
            return str(self._compiled.render(messages=messages, add_generation_prompt=asks, **dict(self.tokens)))
        except MemoryError:
            raise Runaway(self, place) from None
        except Exception as error:  # a template may do anything that its sandbox lets it
            raise UserError(
                f"{place}: {self.where} refuses these messages: {str(error) or type(error).__name__}; {INSTEAD}"
            ) from None

    @cached_property
    def _compiled(self) -> Any:
        """As transformers compiles it: in a sandbox, and without blanks that lines of the template bring."""
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(text: str) -> None:
            raise TemplateError(text)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise UserError(f"{self.where} is no template: {error}; copy it again") from None


class Renderer:
    """Writes conversations in a process that can be ended: a sandbox bounds neither time nor memory, and a template
    may run away on the messages of one row alone."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __enter__(self) -> Renderer:
        # By the thread that stays until the end: the process ends with the one that has started it.
        self._process = _start(self._template)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with suppress(OSError):
            self._process.communicate()

    def require_end(self) -> None:
        """Tries it on two messages. What else it refuses is said of the messages there are."""
        try:
            self.turns(TRIAL, "two messages")
        except Runaway:
            raise
        except UserError:
            return

    def turns(self, messages: Sequence[dict[str, Any]], place: str) -> tuple[str, ...]:
        """As `ChatTemplate.turns`."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        used = psutil.Process(process.pid)
        try:
            before = _processor(used)
            process.stdin.write(json.dumps([messages, place]) + "\n")
            process.stdin.flush()
            while not select.select([process.stdout], [], [], 0.2)[0]:
                if _processor(used) - before > SECONDS:
                    raise Runaway(self._template, place)
            told = parse_json(process.stdout.readline(), finite=False)
        except (OSError, ValueError, psutil.Error):  # it was ended, by a bound on its memory or from outside
            raise Runaway(self._template, place) from None
        if told["refused"]:
            raise Runaway(self._template, place) if told["ran away"] else UserError(told["refused"])
        return tuple(told["turns"])


def _start(template: ChatTemplate) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command, nothing = [sys.executable, "-c", START], subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True)
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):  # it has ended already, which is said of the first messages
        process.stdin.write(json.dumps([template.where, template.source, template.tokens]) + "\n")
        process.stdin.flush()
        process.stdout.readline()  # it is there: what follows is the template's own time
    return process


def _processor(process: psutil.Process) -> float:
    """Seconds of a processor it has had."""
    times = process.cpu_times()
    return float(times.user + times.system)


def answer() -> None:
    """What the process of a `Renderer` does, until its input ends."""
    with suppress(AttributeError):  # on other systems than Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with who started it
    where, source, tokens = parse_json(sys.stdin.readline(), finite=False)
    most = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    template = ChatTemplate(where, source, tuple((name, text) for name, text in tokens))
    print(flush=True)
    for line in sys.stdin:
        told: dict[str, Any] = {"turns": [], "refused": "", "ran away": False}
        try:
            messages, place = parse_json(line, finite=False)
            told["turns"] = template.turns(messages, place)
            if sum(map(len, told["turns"])) > LONGEST:
                raise Runaway(template, place)
        except UserError as error:
            told |= {"turns": [], "refused": str(error), "ran away": isinstance(error, Runaway)}
        print(json.dumps(told), flush=True)


def find_template(tokenizer: str) -> ChatTemplate | None:
    """Of `byte`, a tokenizer.json, or a folder that holds one; None where it has none."""
    if tokenizer == BYTES:
        return None
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    try:
        config: dict[str, Any] = read_json(folder / CONFIG)
    except Missing:
        config = {}
    tokens = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    source: object
    try:
        source, where = read_text(folder / FILE), str(folder / FILE)
    except Missing:
        source, where = config.get(KEY), f"{KEY} of {folder / CONFIG}"
    if isinstance(source, list):  # several, by name
        named = [each.get("template") for each in source if isinstance(each, dict) and each.get("name") == "default"]
        source = named[-1] if named else None
    if isinstance(source, str) and len(source) > LARGEST:
        raise UserError(f"{where} has {len(source):,} characters, more than the {LARGEST:,} one may have; {INSTEAD}")
    return ChatTemplate(where, source, tuple(tokens.items())) if isinstance(source, str) else None


def _content(token: object) -> str:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
