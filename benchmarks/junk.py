"""Junk of every kind for `bad_input.py`: values, and files of every format the program reads, broken in one place."""

from __future__ import annotations

import gzip
import json
import os
import struct
import tomllib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

from cuboid.spec.coding import dumps

HUGE = 8 << 30
"""Bytes of a file of holes."""
RAW = "@@raw@@"
"""Stands in a table for text that no writer would write."""

NUMBERS = (
    *("0", "-1", "1", "-0.0", "0.5", "1e-320", "1e308", "1e309", "-1e309", "nan", "inf", "-inf", "NaN", "Infinity"),
    *(str(2**31), str(2**63), str(2**64), "-" + str(2**63), "10" * 40, "9" * 400, "9" * 5000, "1e999999999"),
    *(
        "-0",
        "+1",
        "1e-999",
        "１２",
        " 1",
        "1 ",
        "0b1",
        "1.",
        ".5",
        "1,5",
        "-",
        "1e",
        "0" * 5000 + "1",
        "1." + "0" * 5000,
    ),
    *("1_000", "0x10", "1e3", "½", "٣", "1000000", "1000000000", "1000000000000", "99999999999999999999"),
)
WORDS = (
    *("", " ", "\t", "none", "null", "true", "false", "[]", "{}", "[[", "]", "=", "a=b", "a.b.c", ".", "..", "-", "--"),
    # No file that root may write to: some of these are where a command writes.
    *("../../../../proc/stat", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/", "~", "nothing", "café", "日本", "🙂"),
    *("x" * 300, "x" * 5000, "a/" * 2000, "%s%n", "{0}", "{{", "$HOME", "`id`", "a\nb", "a\rb", "\x1b[31m", "\x7f"),
    *("[" * 3000, "{a=" * 2000, "'" * 3, '"', "\\", "\\u0000", "\\ud800", "\u202e", "\ufeff", "byte", "cpux1", "dp=1"),
    *("new/../runs/seed", "runs/seed/../other", "run.toml/../kept", "file:///none/../x", "./././runs/seed/", "a//../a"),
    *("python:builtins:str", "python:math:nothing", "python:..:x", "python:a..b:x", "python:builtins:object"),
    *("dp=1; ", "dp=1; dp=0", "; ".join(["dp=1"] * 1025), "127.0.0.1:99999", "a:1,,b:2", "a:" + "9" * 5000),
    *("dp=0", "dp=-1", "dp=99999999999", "tp=" + "9" * 5000, "dp=1,dp=1", "pp=1000000", "dp=1000000000,tp=1000000000"),
)
URLS = (
    *("s3://", "s3://bucket/x", "gs://b/x", "http://127.0.0.1:1/x", "https://127.0.0.1:1/x", "ftp://127.0.0.1:1/x"),
    *("memory://x", "github://a:b@c/d", "zip://a::file://b", "tar://x", "simplecache::file:///x", "foo://x"),
    *("://", "file://", "file:///dev/zero", "hdfs://x/y", "ssh://127.0.0.1/x", "data://x", "reference://x", "dir://x"),
    *("blockcache::memory://x", "filecache::http://127.0.0.1:1/x", "git://x", "jupyter://x", "libarchive://x"),
    *("hf:nothing", "hf:", "hf:/dev/zero", "dask://x", "webhdfs://127.0.0.1:1/x", "smb://127.0.0.1:1/x", "local://x"),
    *(
        "dbfs://x",
        "arrow_hdfs://x",
        "wandb://x",
        "oss://x/y",
        "box://x",
        "generic://x",
        "async_wrapper://x",
        "lakefs://",
    ),
    *("ftp://h/x", "hf://x/y", "http://[::1/x", "http://127.0.0.1:99999/x", "sftp://127.0.0.1:1/x", "root://x"),
)
NOT_TEXT = (os.fsdecode(b"\xff\xfe"), os.fsdecode(b"a\x80b"), "\udc80", "caf\udce9")
"""As bytes that are no UTF-8 come from a command line."""


def word(random: Random) -> str:
    return random.choice(random.choice((NUMBERS, NUMBERS, WORDS, WORDS, URLS, NOT_TEXT)))


# A junk value of a JSON or TOML table, as text.


def _deep(random: Random) -> str:
    depth = random.choice((50, 500, 5000, 100_000))
    return random.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))


def _json_value(random: Random) -> str:
    text = random.choice(
        ("", "\0", "x" * 2000, "../x", "/dev/zero", "日本", "nothing", "-1", "1e9", "dp=2", "s3://x/y")
    )
    plain = (
        "null",
        "true",
        "false",
        "[]",
        "{}",
        '""',
        "[null]",
        "[[]]",
        '{"a": 1}',
        "[1, 2]",
        '"\\ud800"',
        '"\\u0000"',
    )
    return random.choice((json.dumps(text), random.choice(plain), random.choice(NUMBERS[:25]), _deep(random)))


def _toml_value(random: Random) -> str:
    strings = ('""', '"\\u0000"', '"x"', "'/dev/zero'", '"../x"', f'"{"x" * 5000}"', '"nothing"', '"s3://x"', "'[['")
    numbers = ("0", "-1", "1", "0.5", "1e308", "1e309", "nan", "inf", "-inf", str(2**63), "9" * 400, "9" * 5000)
    odd = ("true", "[]", "{}", "[[]]", "1979-05-27", "07:32:00", "[1, 'a']", "{a = 1}", "1000000000", "999999999999999")
    deep = ("[" * 2000 + "]" * 2000, "{a=" * 500 + "1" + "}" * 500, "[" * 100_000)
    return random.choice(random.choice((strings, numbers, odd, odd, deep)))


def _nodes(table: Any) -> list[tuple[Any, Any]]:
    """Every place in a table: the container and its key."""
    found: list[tuple[Any, Any]] = []
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in items:
        found += [(table, key), *_nodes(value)]
    return found


def _break(table: Any, random: Random) -> None:
    """One place of a table: another value, none, or another name."""
    places = _nodes(table)
    if not places:
        return
    holder, key = random.choice(places)
    kind = random.random()
    if kind < 0.7:
        holder[key] = RAW
    elif kind < 0.85 or isinstance(holder, list):
        del holder[key]
    else:
        holder[random.choice((f"{key}x", "", "\0", "a.b", "日", "base", "x" * 1000))] = holder.pop(key)


def _other_text(content: bytes, random: Random, comment: bytes) -> bytes:
    """The same table, as no writer of ours writes it."""
    lines = content.splitlines(keepends=True)
    return random.choice(
        (
            b"\xef\xbb\xbf" + content,
            content.replace(b"\n", b"\r\n"),
            content.replace(b"\n", b"\r"),
            comment + content,
            content + comment,
            content + content,
            content + lines[0],
            content + b"\x1a",
            content.decode().encode("utf-16"),
            content.decode().encode("utf-32-le"),
            b" " * 500_000 + content,
        )
    )


def broken_json(content: bytes, random: Random) -> bytes:
    table = json.loads(content)
    if random.random() < 0.1:
        return _json_value(random).encode(errors="surrogatepass")
    if random.random() < 0.1:
        return _other_text(content, random, b"// a comment\n")
    if random.random() < 0.1 and isinstance(table, dict) and table:  # a key twice, or a hundred thousand more
        text, name = content.rstrip()[:-1], json.dumps(random.choice(list(table)))
        more = random.choice((f"{name}: {_json_value(random)}", ", ".join(f'"k{n}": {n}' for n in range(10**5))))
        return text + b", " + more.encode(errors="surrogatepass") + b"}"
    _break(table, random)
    return json.dumps(table).replace(f'"{RAW}"', _json_value(random)).encode()


def broken_toml(content: bytes, random: Random) -> bytes:
    kind = random.random()
    if kind < 0.1:
        return _other_text(content, random, b"// a comment\n")
    if kind < 0.3:
        text = content.decode()
        added = (
            "".join(f"k{n} = {n}\n" for n in range(10**5)),
            "[training]\n[training]\n",
            "[training.steps]\nx = 1\n",
            "training.steps = 1\ntraining.steps = 2\n",
            "model = []\n[[model]]\n",
            "x = 2026-13-45T99:99:99Z\n",
            "x = 9999-12-31T23:59:59+99:99\n",
            "[a" + ".a" * 20_000 + "]\n",
            "x = " + _toml_value(random) + "\n",
            "".join(f"[[a]]\nb = {n}\n" for n in range(20_000)),
            "a" + ".b" * 5000 + " = 1\n",
            "\n[plan]\nx = 1\n",
            'base = "run.toml"\n',
            "model = 'model.toml'\n",
            "\0",
            "[model]\nbase = 'model.toml'\n",
            "# " + "x" * 3_000_000 + "\n",
        )
        return random.choice((random.choice(added) + text, text + random.choice(added))).encode()
    table = tomllib.loads(content.decode())
    _break(table, random)
    return dumps(table).replace(f'"{RAW}"', _toml_value(random)).encode()


def broken_rows(content: bytes, random: Random) -> bytes:
    """JSON lines: one row broken, cut off, twice, out of order, or no row at all."""
    rows = content.splitlines(keepends=True)
    if not rows:
        return _json_value(random).encode(errors="surrogatepass") + b"\n"
    place = random.randrange(len(rows))
    odd = (
        b"\n",
        b"null\n",
        b"[]\n",
        b"1\n",
        b"{}\n",
        b'{"step": 1}\n',
        b"\xff\xfe\n",
        b"\0\0\0\n",
        b'{"step"',
        b"x" * 10**6,
    )
    kind = random.random()
    if kind < 0.6:
        rows[place] = broken_json(rows[place], random) + b"\n"
    elif kind < 0.75:
        rows[place] = rows[place][: random.randrange(len(rows[place]))] + random.choice((b"", b"\n"))
    elif kind < 0.9:
        rows.insert(place, random.choice(odd))
    else:
        random.shuffle(rows)
        rows.append(rows[place])
    return b"".join(rows)


def broken_tokenizer(content: bytes, random: Random) -> bytes:
    table = json.loads(content)
    model = table["model"]
    runaway = {"type": "Split", "pattern": {"Regex": random.choice(("(a+)+$", "(.*)*x", "(?:(?:a|a)*)*b", "("))}}
    kind = random.randrange(12)
    if kind == 0:
        del table["model"]
    elif kind == 1:
        model["vocab"] = {}
    elif kind == 2:
        model["vocab"][next(iter(model["vocab"]))] = random.choice((2**31 - 1, 2**32 - 1, 2**33, -1, 10**9))
    elif kind == 3:
        table["pre_tokenizer"] = {**runaway, "behavior": "Isolated", "invert": False}
    elif kind == 4:
        table["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x" * 1000}
    elif kind == 5:
        model["merges"] = [["no", "such"], "a", 1]
    elif kind == 6:
        table["added_tokens"] = [{**(table["added_tokens"] or [{}])[0], "id": random.choice((2**31, 10**9, -1, 2**40))}]
    elif kind == 7:
        table["model"] = {
            "type": random.choice(("WordLevel", "Unigram", "WordPiece", "BPE")),
            "vocab": {},
            "unk_token": "?",
        }
    elif kind == 8:
        table["truncation"] = {
            "max_length": 2**63 - 1,
            "strategy": "LongestFirst",
            "stride": 2**62,
            "direction": "Right",
        }
    elif kind == 9:
        table["normalizer"] = {"type": "Prepend", "prepend": "x" * 10_000_000}
    else:
        return broken_json(content, random)
    return json.dumps(table).encode()


def broken_config(content: bytes, random: Random) -> bytes:
    """Of a tokenizer: also with templates that do not end, or hold all memory."""
    table = json.loads(content)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    wild = (
        loop,
        "{{ 'x' * 10**10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a'.ljust(10**10) }}",
        "{% if",
        "{{ a.b.c }}",
        "x" * 10_000_000,
        "{% for m in messages %}{% if m.content == 'hi' %}" + loop + "{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content == 'hi' %}{{ 'x' * 10**9 * 2 }}{% endif %}{% endfor %}",
        [{"name": ["default"], "template": "x"}],
        [],
        [{}],
    )
    if random.random() < 0.5:
        return broken_json(content, random)
    return json.dumps({**table, "chat_template": random.choice(wild)}).encode()


def broken_safetensors(content: bytes, random: Random) -> bytes:
    (size,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + size], content[8 + size :]
    kind = random.randrange(9)
    if kind == 0:
        return struct.pack("<Q", random.choice((0, 1, size * 2, 2**40, 2**63, 2**64 - 1))) + header + data
    if kind == 1:
        return content[: random.randrange(len(content))]
    if kind == 2:
        return broken_bytes(content, random)
    table = json.loads(header)
    entry = table[random.choice([name for name in table if name != "__metadata__"])]
    if kind == 5:  # not a number, -1, or far beyond any vocabulary
        start, stop = entry["data_offsets"]
        filled = random.choice((b"\xff", b"\x7f", b"\0")) * (stop - start)
        return content[: 8 + size + start] + filled + data[stop:]
    if kind == 7:  # as many as a header holds
        count = random.choice((20_000, 20_000, 600_000))
        more = ", ".join(f'"t{n}": {{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}' for n in range(count))
        header = header.rstrip()[:-1] + b", " + more.encode() + b"}"
        return struct.pack("<Q", len(header)) + header + data
    if kind == 8:  # two tensors in one place, a hole between them, one beyond the end, one twice
        start, stop = entry["data_offsets"]
        shift = random.choice((-8, 8, len(data), -stop))
        entry["data_offsets"] = random.choice(([start + shift, stop + shift], [stop, start], [start, stop + 8]))
        header = json.dumps(table).encode()
        if random.random() < 0.3:
            header = header[:-1] + b", " + json.dumps(table).encode()[1:]
    elif kind == 6:
        same = {"F32": "I32", "I64": "F64", "BF16": "I16", "F64": "I64"}
        entry["dtype"] = same.get(entry["dtype"], "U8")
        header = json.dumps(table).encode()
    elif kind == 3:
        entry[random.choice(("dtype", "shape", "data_offsets"))] = random.choice(
            ("F4", [], [2**62, 4], [-1], [0, 2**63], [8, 4], None, "I64", [0, 0], {"a": 1}, [1.5, 2.5])
        )
        header = json.dumps(table).encode()
    else:
        header = broken_json(header, random)
    return struct.pack("<Q", len(header)) + header + data


def broken_gzip(content: bytes, random: Random) -> bytes:
    kind = random.randrange(4)
    if kind == 0:
        return _bomb(random.choice((b"\0", b"a", b"\n", b'{"text": "a"}\n')))
    if kind == 1:
        return gzip.compress(broken_rows(gzip.decompress(content), random))
    return broken_bytes(content, random)


_bombs: dict[bytes, bytes] = {}


def _bomb(block: bytes) -> bytes:
    """4 GiB in a few MB: members of a gzip file follow each other."""
    if block not in _bombs:
        _bombs[block] = gzip.compress(block * ((64 << 20) // len(block))) * 64
    return _bombs[block]


def broken_parquet(content: bytes, random: Random) -> bytes:
    import pyarrow
    import pyarrow.parquet as parquet

    kind = random.randrange(9)
    if kind > 6:
        return broken_bytes(content, random)
    columns: dict[int, Callable[[], Any]] = {
        0: lambda: pyarrow.array([b"\xff\xfe", b"a"], type=pyarrow.binary()).view(pyarrow.string()),
        1: lambda: pyarrow.array([1, 2]),
        2: lambda: pyarrow.array([None, None], type=pyarrow.string()),
        3: lambda: pyarrow.array([["a"], ["b"]]),
        4: lambda: pyarrow.array([2**31 - 1], type=pyarrow.date32()),
        5: lambda: pyarrow.nulls(20_000_000),
        6: lambda: pyarrow.array(["x" * 1000] * 100_000),
    }
    stream = BytesIO()
    parquet.write_table(pyarrow.table({"text": columns[kind]()}), stream)
    return stream.getvalue()


def broken_csv(content: bytes, random: Random) -> bytes:
    rows = [line.split(",") for line in content.decode().splitlines()]
    row = rows[random.randrange(len(rows))]
    row[random.randrange(len(row))] = random.choice((random.choice(NUMBERS), random.choice(WORDS)))
    return "\n".join(",".join(row) for row in rows).encode(errors="surrogateescape")


def broken_bytes(content: bytes, random: Random) -> bytes:
    """Any file: a few bytes flipped, cut, doubled, put in between."""
    if not content:
        return random.randbytes(100)
    place, length = random.randrange(len(content)), random.choice((1, 2, 8, 100))
    kind = random.randrange(8)
    junk = random.choice(
        (b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"[" * 5000, b"\xef\xbb\xbf", random.randbytes(length))
    )
    if kind <= 2:
        edited = bytearray(content)
        for _ in range(random.choice((1, 1, 4, 32))):
            edited[random.randrange(len(edited))] ^= 1 << random.randrange(8)
        return bytes(edited)
    if kind == 3:
        return content[:place]
    if kind == 4:
        return content[:place] + content[place + length :]
    if kind == 5:
        return content[:place] + content[place : place + length] * 3 + content[place + length :]
    return content[:place] + junk + content[place:]


FORMATS: dict[str, Callable[[bytes, Random], bytes]] = {
    "json": broken_json,
    "toml": broken_toml,
    "rows": broken_rows,
    "tokenizer": broken_tokenizer,
    "config": broken_config,
    "safetensors": broken_safetensors,
    "gzip": broken_gzip,
    "parquet": broken_parquet,
    "csv": broken_csv,
    "bytes": broken_bytes,
}


def format_of(path: Path) -> str:
    if path.name in ("tokenizer.json", "tokenizer_config.json"):
        return "tokenizer" if path.name == "tokenizer.json" else "config"
    endings = {".json": "json", ".toml": "toml", ".jsonl": "rows", ".safetensors": "safetensors", ".gz": "gzip"}
    return {**endings, ".parquet": "parquet", ".csv": "csv"}.get(path.suffix, "bytes")
