"""Conversations as the text a model expects, by the chat template of its tokenizer. A tokenizer without one has no way
to write them, and none is made up: a model would learn marks that nobody sends it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cuboid.data.tokenizer import BYTES
from cuboid.errors import UserError
from cuboid.readers import Missing, read_json, read_text

FILE, CONFIG, KEY = "chat_template.jinja", "tokenizer_config.json", "chat_template"
TRIAL_SECONDS = 10.0
TRIAL = """
import json, psutil, resource, sys
from cuboid.data.chat import ChatTemplate
from cuboid.errors import UserError
most = psutil.Process().memory_info().vms + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
source, tokens = json.load(sys.stdin)
messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
try:
    ChatTemplate("", source, tuple(tokens.items())).turns(messages, "")
except UserError as error:  # what else it refuses is said of the messages there are
    sys.exit(MemoryError.__name__ in str(error))
"""
INSTEAD = "use rows with prompt and completion, or --tokenizer FOLDER with a chat template"


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
        except Exception as error:  # a template may do anything that its sandbox lets it
            raise UserError(
                f"{place}: {self.where} refuses these messages: {str(error) or type(error).__name__}; {INSTEAD}"
            ) from None

    def require_end(self) -> None:
        """Tries it in a process that can be ended: a sandbox bounds neither time nor memory."""
        told = json.dumps([self.source, dict(self.tokens)])
        try:
            done = subprocess.run(
                [sys.executable, "-c", TRIAL], input=told, text=True, capture_output=True, timeout=TRIAL_SECONDS
            )
        except subprocess.TimeoutExpired:
            done = None
        if done is None or done.returncode:
            raise UserError(f"{self.where} takes for ever, or all memory, on two messages; {INSTEAD}") from None

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
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    return ChatTemplate(where, source, tuple(tokens.items())) if isinstance(source, str) else None


def _content(token: object) -> str:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
