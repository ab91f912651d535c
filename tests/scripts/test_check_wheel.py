"""A wheel in the cache is checked before it is installed: damaged, missing and added files are found."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from setting_up import check_wheel

ROOT = Path(__file__).resolve().parents[2]
FILES = {"horovod/__init__.py": b"version = 1\n", "horovod/core.so": bytes(range(256)) * 40}
LIST = "horovod-1.dist-info/RECORD"


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def wheel(path: Path, held: dict[str, bytes], listed: dict[str, bytes]) -> Path:
    rows = [f"{name},sha256={digest(content)},{len(content)}" for name, content in listed.items()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in held.items():
            archive.writestr(name, content)
        archive.writestr(LIST, "\n".join([*rows, f"{LIST},,"]))
    return path


def test_a_whole_wheel_has_no_fault(tmp_path: Path) -> None:
    assert check_wheel.fault(wheel(tmp_path / "a.whl", FILES, FILES)) == ""


@pytest.mark.parametrize(
    "held,said",
    [
        ({**FILES, "horovod/core.so": b"other"}, "horovod/core.so is damaged"),
        ({"horovod/core.so": FILES["horovod/core.so"]}, "horovod/__init__.py is missing"),
        ({**FILES, "horovod/more.py": b""}, "horovod/more.py is not listed"),
    ],
)
def test_another_content_than_listed_is_named(held: dict[str, bytes], said: str, tmp_path: Path) -> None:
    assert check_wheel.fault(wheel(tmp_path / "a.whl", held, FILES)) == said


@pytest.mark.parametrize(
    "listed",
    ["horovod/core.so", 'horovod/core.so,"' + 200_000 * "x", "horovod/core.so,shake_128=,10240", "horovod/core.so,md5=x,10240"],
)
def test_a_list_that_is_none_gets_a_sentence(listed: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("horovod/core.so", FILES["horovod/core.so"])
        archive.writestr(LIST, f"{listed}\n{LIST},,")
    done = subprocess.run([sys.executable, check_wheel.__file__, tmp_path / "a.whl"], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "a.whl: " in done.stderr


def test_a_file_that_was_cut_off_or_flipped_is_found(tmp_path: Path) -> None:
    whole = wheel(tmp_path / "a.whl", FILES, FILES).read_bytes()
    with zipfile.ZipFile(tmp_path / "a.whl") as archive:
        begins = [info.header_offset + 30 + len(info.filename) for info in archive.infolist()]
        lengths = [info.compress_size for info in archive.infolist()]
    content = [begin + i for begin, length in zip(begins, lengths, strict=True) for i in range(length)]
    flipped = [whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in content]
    for damaged in (whole[: len(whole) // 2], b"", *flipped):
        (tmp_path / "b.whl").write_bytes(damaged)
        if check_wheel.fault(tmp_path / "b.whl") == "":  # the last bits of a compressed file mean nothing
            with zipfile.ZipFile(tmp_path / "b.whl") as archive:
                assert {name: archive.read(name) for name in FILES} == FILES
    for at in range(len(whole)):  # headers, too: some of their bytes mean nothing
        (tmp_path / "b.whl").write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        check_wheel.fault(tmp_path / "b.whl")
    assert check_wheel.fault(tmp_path / "absent.whl").startswith("it cannot be read")


def test_set_up_drops_a_damaged_wheel_alone(tmp_path: Path) -> None:
    whole, damaged = (wheel(tmp_path / f"horovod-{name}.whl", FILES, FILES) for name in ("whole", "damaged"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    script = f"""set -euo pipefail
        ROOT={ROOT} python={sys.executable}
        . "$ROOT/scripts/setting_up/horovod.sh"
        drop_damaged {tmp_path}"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert whole.exists() and not damaged.exists()
    assert "horovod-damaged.whl: it cannot be read" in done.stderr and "building Horovod again" in done.stderr
