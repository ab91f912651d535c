"""The GPU check where there is no GPU: its stages' ends, its offline sources, and its readings of Horovod, NCCL and traces."""

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from laboratory.gpu import gpu, horovod_build, prepare, stages, trace, work
from laboratory.gpu.stages import Clock, Failed, Impossible, Record, Stage, TimedOut
from setting_up.horovod_patches import PATCHES

ROOT = Path(__file__).resolve().parents[2]

PYTHON = sys.executable


def run_all(tmp_path: Path, *chosen: Stage, total: float = 30) -> list[Record]:
    return stages.run(chosen, total, tmp_path, {})


def test_every_stage_has_its_turn_and_its_reason(tmp_path: Path) -> None:
    def raises(error: Exception) -> Stage:
        def run(clock: Clock) -> Record:
            raise error

        return Stage(type(error).__name__, run, 5)

    fine = Stage("fine", lambda clock: {"figure": 1}, 5)
    records = run_all(tmp_path, *map(raises, (Failed("bad"), Impossible("no nvcc"), TimedOut("slow"), KeyError("odd"))), fine)
    assert [record["status"] for record in records] == ["failed", "impossible", "timed out", "failed", "ok"]
    assert [record.get("reason") for record in records[:4]] == ["bad", "no nvcc", "slow", "KeyError: 'odd'"]
    assert records[4]["figures"] == {"figure": 1}


def test_a_stage_runs_only_after_the_stages_it_needs_went_well(tmp_path: Path) -> None:
    def broken(clock: Clock) -> Record:
        raise Failed("it broke")

    second = Stage("tests", lambda clock: {}, 5, ("build",))
    assert run_all(tmp_path, Stage("build", broken, 5), second)[1]["reason"].startswith("it needs the stage build")
    assert run_all(tmp_path, second.among(["tests"]))[0]["status"] == "ok"


def ended(stat: Path) -> bool:
    """Return whether a process is gone, or has ended and waits for its parent to notice."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_command_is_ended_at_its_limit_with_all_it_started(tmp_path: Path) -> None:
    marker = tmp_path / "child"
    program = f"echo begun; sleep 60 & echo $! > {marker}; wait"
    began = time.monotonic()
    (record,) = run_all(tmp_path, Stage("slow", lambda clock: {"said": clock.command(["sh", "-c", program])}, 2))
    assert record["status"] == "timed out"
    assert "begun" in record["reason"]
    assert time.monotonic() - began < 40
    child = Path("/proc") / marker.read_text().strip() / "stat"
    end = time.monotonic() + 10
    while not ended(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert ended(child)


def test_a_failed_command_shows_its_end_and_the_log_keeps_the_rest(tmp_path: Path) -> None:
    program = "for i in range(50): print('line', i)\nraise SystemExit(3)"
    (record,) = run_all(tmp_path, Stage("bad one", lambda clock: {"said": clock.command([PYTHON, "-c", program])}, 30))
    assert "ended with 3" in record["reason"]
    assert "line 49" in record["reason"]
    assert "line 10\n" not in record["reason"]
    assert "line 10\n" in (tmp_path / "bad-one.log").read_text()


def test_the_whole_check_has_a_limit_too(tmp_path: Path) -> None:
    def slow(clock: Clock) -> Record:
        time.sleep(0.2)
        return {"left": clock.left()}

    first, second = run_all(tmp_path, Stage("first", slow, 50), Stage("second", slow, 50), total=0.1)
    assert first["figures"]["left"] < 0
    assert second["status"] == "timed out"


def test_a_gpu_is_read_from_nvidia_smi(tmp_path: Path) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1, 9.0, 143771 MiB'\n")
    fake.chmod(0o755)
    found = gpu.find(str(fake))
    assert found == gpu.Gpu("NVIDIA H200", "580.1", "9.0", "143771 MiB")
    assert found.arch == "90"
    assert gpu.find(str(tmp_path / "absent")) is None
    assert gpu.parse("No devices were found") is None


def test_it_starts_before_gradcomp_is_built_and_without_torch() -> None:
    code = "import sys; sys.modules |= {'gradcomp': None, 'torch': None}; import laboratory.gpu.calls, laboratory.gpu.output"
    subprocess.run([PYTHON, "-c", code], cwd=ROOT / "scripts", check=True)


def test_results_are_found_wherever_a_launcher_puts_them() -> None:
    assert work.marked('noise\n[1,0]<stdout>:@result {"a": 1}\n', "@result ") == {"a": 1}
    with pytest.raises(Failed, match="no result"):
        work.marked("noise")


def test_figures_of_the_tests_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>'
        '<testcase name="c"><skipped/></testcase><testcase name="d"><error/></testcase></testsuite></testsuites>'
    )
    assert work.count(report) == {"tests": 4, "skipped": 1, "failures": ["b", "d"]}


def sdist(folder: Path, fits: bool) -> None:
    """Make an sdist with the passages of Horovod's files that are patched, or with none."""
    source = folder / f"horovod-{horovod_build.VERSION}"
    for patch in PATCHES:
        path = source / patch.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + f"{patch.passage if fits else ''}\n")
    with tarfile.open(folder / f"{source.name}.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    shutil.rmtree(source)


def test_horovod_is_patched_as_set_up_does_or_refused(tmp_path: Path) -> None:
    with pytest.raises(Impossible, match="--prepare"):
        horovod_build.unpack(tmp_path, tmp_path / "out")
    sdist(tmp_path, fits=True)
    tree = horovod_build.unpack(tmp_path, tmp_path / "out")
    for patch in PATCHES:
        assert patch.replacement in (tree / patch.file).read_text()
    sdist(tmp_path, fits=False)
    with pytest.raises(Impossible, match=r"the patches do not fit horovod-.*\.tar\.gz: .* 0 times, not once"):
        horovod_build.unpack(tmp_path, tmp_path / "other")


def test_horovod_is_the_version_that_set_up_builds() -> None:
    assert f"\nHOROVOD={horovod_build.VERSION}\n" in (ROOT / "scripts" / "setup").read_text()


def test_horovod_is_built_for_that_gpu_alone() -> None:
    assert horovod_build.variables(gpu.Gpu("X", "1", "9.0", "1 MiB"))["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
    assert "HOROVOD_BUILD_CUDA_CC_LIST" not in horovod_build.variables(None)


def test_nccl_is_linked_by_the_name_that_linkers_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "nvidia" / "nccl"
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text("")
    found = importlib.machinery.ModuleSpec("nvidia.nccl", None)
    found.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    wanted = horovod_build.nccl_variables(tmp_path / "linked")
    assert wanted["HOROVOD_GPU_OPERATIONS"] == "NCCL" and (Path(wanted["HOROVOD_NCCL_INCLUDE"]) / "nccl.h").exists()
    assert (Path(wanted["HOROVOD_NCCL_LIB"]) / "libnccl.so").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if not Path("/usr/include/nccl.h").exists():
        with pytest.raises(Impossible, match="NCCL is missing"):
            horovod_build.nccl_variables(tmp_path / "linked")


def event(category: str, name: str, begin: float, length: float, correlation: int = 0) -> Record:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "args": {"correlation": correlation}}


def test_overlap_is_read_from_a_trace() -> None:
    events = [
        event("user_annotation", trace.BACKWARD, 100, 50),
        *(event("cuda_runtime", "cudaLaunchKernel", at, 1, number) for number, at in enumerate((90, 110, 120, 130, 160))),
        event("kernel", "forward", 95, 10, 0),
        event("kernel", "gemm", 115, 20, 1),
        event("kernel", "gradcomp::cuda::add_tiles", 140, 10, 2),
        event("kernel", "gemm", 150, 50, 3),
        event("kernel", "gradcomp::cuda::spread_tiles", 210, 30, 4),
        {"ph": "i", "name": "a mark"},
    ]
    assert trace.overlap({"traceEvents": events}) == {
        "kernels": 2,
        "kernels_of_backward": 2,
        "ms": 0.04,
        "share_in_backward": 0.25,
    }
    assert trace.overlap({"traceEvents": events[:1]})["share_in_backward"] is None


def test_only_missing_packages_are_unpacked(tmp_path: Path) -> None:
    for name in ("pytest", "surely_not_there"):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    site = tmp_path / "site"
    assert prepare.unpack_missing(tmp_path, site, ["pytest", "surely_not_there"]) == ["surely_not_there-1-py3-none-any.whl"]
    assert [path.name for path in site.iterdir()] == ["surely_not_there"]
    assert prepare.unpack_missing(tmp_path, site, ["surely_not_there"]) == []
