"""Checksums that come with Python, where no faster ones are installed, are as good."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from cuboid.checkpoint.location import locate
from cuboid.checkpoint.manifest import (
    FAST,
    MANIFEST,
    PLAIN,
    Manifest,
    StoredFile,
    checksum_of_bytes,
    checksum_of_file,
    kind_of,
    read_manifest,
)
from cuboid.errors import UserError

CONTENT = bytes(range(256)) * 9000


def test_python_s_own_checksum_is_what_it_says() -> None:
    own = checksum_of_bytes(CONTENT, PLAIN)
    assert own == "blake2b_128:" + hashlib.blake2b(CONTENT, digest_size=16).hexdigest()
    assert checksum_of_bytes(CONTENT, FAST) == checksum_of_bytes(CONTENT)


@pytest.mark.parametrize("kind", [FAST, PLAIN])
def test_a_file_read_in_parts_has_the_checksum_of_its_bytes(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    read: list[int] = []
    found = checksum_of_file(locate(tmp_path) / "file", len(CONTENT), kind, read.append)
    assert found == checksum_of_bytes(CONTENT, kind)
    assert kind_of(found) == kind and sum(read) == len(CONTENT) and len(read) > 1


def test_a_manifest_written_elsewhere_with_the_other_kind_is_read(tmp_path: Path) -> None:
    manifest = Manifest(
        3, 3, 48, "data", "dp=1", "", files={"index.json": StoredFile(2, checksum_of_bytes(b"{}", PLAIN))}
    )
    (tmp_path / MANIFEST).write_bytes(manifest.render(PLAIN))
    assert read_manifest(tmp_path) == manifest
    damaged = manifest.render(PLAIN).replace(b"48", b"49")
    (tmp_path / MANIFEST).write_bytes(damaged)
    with pytest.raises(UserError, match=r"manifest.json does not match its checksum"):
        read_manifest(tmp_path)


def test_a_machine_without_the_fast_kind_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UserError, match="pip install xxhash"):
        checksum_of_bytes(CONTENT, FAST)
