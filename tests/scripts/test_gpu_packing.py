"""gpu_check's pack, made where there is no GPU, and its use there: parts that are left out, and parts that do not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from gradcomp.native import extension
from laboratory import machine
from laboratory.cluster import network
from laboratory.gpu import local_steps, packing, stages, work
from laboratory.gpu.stages import Clock, Gpu, Impossible, Output, Record, Stage
from laboratory.tasks import cifar
from laboratory.tasks.table import TASKS

GPU = Gpu("NVIDIA H200", "580.1", "9.0", "1 MiB")


def fake(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def pack_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check's folders lie in this one."""
    for name, value in {"BUILD": "gpu", "PACK": "gpu-pack", "PACKAGE": "gpu/package"}.items():
        for module in (stages, work, packing):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, folder / value)
    monkeypatch.setattr(packing, "WORK", folder / "prepare")
    (folder / "gpu").mkdir()


def no_headers(clock: Clock) -> Record:
    raise Impossible("left out: no headers")


def test_prepare_packs_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_here(tmp_path, monkeypatch)
    monkeypatch.setattr(packing, "environment", lambda clock: {})
    built = tmp_path / "_native.so"
    shutil.copy(extension.native.__file__, built)
    monkeypatch.setattr(packing, "compiled", lambda *arguments: built)
    monkeypatch.setattr(stages, "toolkit", lambda: tmp_path)
    monkeypatch.setattr(packing, "horovod", no_headers)
    monkeypatch.setattr(network, "find", lambda name: None)
    data = tmp_path / "data"
    data.mkdir()
    (data / packing.PICTURES).write_bytes(bytes(3 << 20))
    (data / packing.TEXT).write_text("To be, or not to be")
    assert packing.prepare(data) == 0
    said = capsys.readouterr().out
    packed = sorted(path.name for path in (tmp_path / "gpu-pack").iterdir())
    assert packed == ["_native.so", packing.PICTURES, "note.json", packing.TEXT]
    size = sum(path.stat().st_size for path in (tmp_path / "gpu-pack").iterdir())
    assert f"{size / 2**20:.1f} MiB of 64, with the note and pictures, text, extension" in said
    assert "left out: no headers" in said and "ip is missing; install the Debian package iproute2" in said
    assert (tmp_path / "gpu-pack" / "_native.so").stat().st_size <= built.stat().st_size  # stripped
    note = stages.prepared()
    assert note["packed"] == ["pictures", "text", "extension"] and note["sources"] == packing.sources()
    assert note["commit"] == machine.commit()  # None without git
    (data / packing.PICTURES).write_bytes(bytes(65 << 20))
    assert packing.prepare(data) == 1 and "too much to travel" in capsys.readouterr().err


def test_the_environment_has_the_python_of_the_gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "python", "echo 3.9")
    for named in (tmp_path / "python", tmp_path / "none"):
        monkeypatch.setenv("PYTHON", str(named))
        with pytest.raises(Impossible, match=r"is no Python 3\.12; name one in PYTHON"):
            packing.interpreter()
    fake(tmp_path / "python", "echo 3.12")
    monkeypatch.setenv("PYTHON", str(tmp_path / "python"))
    assert packing.interpreter() == str(tmp_path / "python")


def test_prepare_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_here(tmp_path, monkeypatch)
    monkeypatch.setattr(packing, "environment", lambda clock: {})
    monkeypatch.setattr(stages, "toolkit", lambda: None)
    monkeypatch.setattr(network, "find", lambda name: None)
    assert packing.prepare(None) == 0
    said = capsys.readouterr().out
    assert said.count("left out: nvcc is missing; install a CUDA toolkit") == 2
    assert all(f"name a folder that has {file} by --data" in said for file in (packing.PICTURES, packing.TEXT))
    assert "with the note and nothing else" in said


@pytest.mark.parametrize(
    "fault,said",
    [
        ("", ""),
        ("content", "the prepared extension is not used: "),
        ("sources", "its sources have changed since"),
        ("arch", "it is for sm_90, and this GPU is sm_100"),
    ],
)
def test_a_prepared_extension_is_used_if_it_imports(
    fault: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This environment's extension stands for it, and for the one that is built in its place."""
    pack_here(tmp_path, monkeypatch)
    monkeypatch.setattr(packing, "compiled", lambda *arguments: extension.native.__file__)
    monkeypatch.setattr(packing, "EXTENSION", packing.EXTENSION.replace("extension.BUILT_WITH_CUDA", "False"))
    packed = tmp_path / "gpu-pack" / Path(extension.native.__file__).name
    packed.parent.mkdir()
    shutil.copy(extension.native.__file__, packed)
    if fault == "content":
        packed.write_text("no library")
    note = {"packed": ["extension"], "sources": packing.sources(), "arch": "90", "commit": "123"}
    note |= {"sources": "others"} if fault == "sources" else {}
    (packed.parent / "note.json").write_text(json.dumps(note))
    gpu = GPU._replace(capability="10.0") if fault == "arch" else None
    stage = Stage("build", partial(work.build, device="cpu", gpu=gpu), 60)
    (record,) = stages.run([[stage]], 60, tmp_path / "log", {"PYTHONPATH": str(stages.PACKAGE)}, len)
    assert record["status"] == "ok", record
    assert record["figures"]["prepared"] == ([] if fault else ["extension"])
    assert said in " ".join(record["figures"]["said"]) and bool(said) == bool(record["figures"]["said"])


def test_a_prepared_horovod_that_does_not_import_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_here(tmp_path, monkeypatch)
    packed = tmp_path / "gpu-pack" / "horovod" / "horovod"
    packed.mkdir(parents=True)
    (packed / "__init__.py").write_text("raise ImportError('another torch')")
    (tmp_path / "gpu-pack" / "note.json").write_text(json.dumps({"packed": ["horovod"]}))
    stages.PACKAGE.mkdir(parents=True)
    found: list[object] = []

    def run(clock: Clock) -> Record:
        found.append(packing.install(clock, None))
        return {}

    stages.run([[Stage("install", run, 30)]], 30, tmp_path / "log", {"PYTHONPATH": str(stages.PACKAGE)}, len)
    assert found == [([], ["the prepared horovod is not used: ImportError: another torch"])]
    assert not [*stages.PACKAGE.iterdir()]


@pytest.mark.parametrize("commit", [None, "456def-dirty"])
def test_a_result_without_git_has_the_commit_of_the_pack(
    commit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has one of a checkout into which files were carried."""
    pack_here(tmp_path, monkeypatch)
    monkeypatch.setattr(machine, "commit", lambda: commit)
    (tmp_path / "gpu-pack").mkdir()
    (tmp_path / "gpu-pack" / "note.json").write_text('{"commit": "123abc"}')
    output = Output(tmp_path, "tests", GPU)
    output.write([{"name": "machine", "status": "running"}])
    assert json.loads(output.result.read_text())["commit"] == "123abc"


def test_the_packed_text_is_that_of_local_steps() -> None:
    source = TASKS[local_steps.TEXT].source
    assert source is not None and source.file == packing.TEXT and cifar.SOURCE.file == packing.PICTURES


def test_packed_programs_run_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their own libraries, although their files may have lost the right to run on the way."""
    if lacking := [name for name in packing.PROGRAMS if not network.find(name)]:
        pytest.skip(f"packed programs were NOT tested: {lacking} are missing")
    pack_here(tmp_path, monkeypatch)
    stages.PACK.mkdir()
    stages.PACKAGE.mkdir()
    (tmp_path / "gpu-pack" / "note.json").write_text(json.dumps({"packed": [packing.IPROUTE2]}))
    done: list[object] = []

    def pack(clock: Clock) -> Record:
        packing.programs(clock)
        for path in (stages.PACK / packing.IPROUTE2).rglob("*.*"):
            path.chmod(0o644)
        done.append(packing.install(clock, None))
        return {}

    stages.run([[Stage("pack", pack, 30)]], 30, tmp_path / "log", {}, len)
    assert done == [([packing.IPROUTE2], [])], (tmp_path / "log").read_text()
    bare = tmp_path / "bare"
    bare.mkdir()
    monkeypatch.setenv("PATH", str(bare))
    packing.offer_programs()
    for name in packing.PROGRAMS:
        said = subprocess.run([name, "-V"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
        assert said.returncode == 0 and "iproute2" in said.stdout, said
        assert not Path(shutil.which(name) or "/").is_relative_to("/usr")


def test_packed_programs_that_do_not_run_are_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_here(tmp_path, monkeypatch)
    (tmp_path / "gpu-pack" / packing.IPROUTE2 / "lib").mkdir(parents=True)
    for name in packing.PROGRAMS:
        fake(tmp_path / "gpu-pack" / packing.IPROUTE2 / name, "echo version GLIBC_2.99 not found; exit 1")
    (tmp_path / "gpu-pack" / "note.json").write_text(json.dumps({"packed": [packing.IPROUTE2]}))
    stages.PACKAGE.mkdir()
    found: list[object] = []
    stages.run(
        [[Stage("install", lambda clock: found.append(packing.install(clock, None)) or {}, 30)]], 30, tmp_path / "log", {}, len
    )
    assert found == [([], ["the prepared iproute2 is not used: version GLIBC_2.99 not found"])]
    assert not [*stages.PACKAGE.iterdir()]
