"""gradcomp doctor: its findings here, and its advice for a problem."""

from __future__ import annotations

import builtins
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

import gradcomp
from gradcomp import doctor
from gradcomp.__main__ import main
from gradcomp.native import extension


def finding(subject: str) -> doctor.Finding:
    (found,) = (each for each in doctor.findings() if each.subject == subject)
    return found


def has_gpus(count: int, monkeypatch: pytest.MonkeyPatch, capability: int = 9) -> None:
    """Put what torch says of GPUs in its place: none is needed to see what doctor makes of them."""

    class Properties:
        name, major, minor = "GPU", capability, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)


SUBJECTS = ["gradcomp", "Python", "torch", "extension", "GPU", "Horovod", "DDP", "FSDP2", "host name", "threads"]


def test_the_command_names_every_part() -> None:
    done = subprocess.run([sys.executable, "-m", "gradcomp", "doctor"], capture_output=True, text=True)
    assert done.returncode == ("Problems:" in done.stdout)
    lines = [line[4:].split("  ")[0].strip() for line in done.stdout.splitlines() if line[:4] in ("ok  ", "!!  ")]
    assert list(dict.fromkeys(lines)) == SUBJECTS
    assert torch.__version__ in done.stdout and importlib.metadata.version("horovod") in done.stdout


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gradcomp {importlib.metadata.version('gradcomp')}\n"


def test_a_full_disk_gets_a_sentence_and_a_reader_that_has_enough_none() -> None:
    words = f"{sys.executable} -m gradcomp describe topk"
    full = subprocess.run(f"{words} >/dev/full", shell=True, capture_output=True, text=True)
    assert (full.returncode, full.stderr) == (1, "gradcomp: cannot write the answer: No space left on device\n")
    enough = subprocess.run(f"{words} | true", shell=True, capture_output=True, text=True)
    assert (enough.returncode, enough.stderr) == (0, "")


def test_there_is_no_problem_where_no_gpu_is_and_the_host_name_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod.torch", reason="a report without findings was NOT tested: Horovod is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert [each.subject for each in doctor.findings()] == SUBJECTS
    assert doctor.report().endswith("\nNo problems.")


def test_gpus_that_do_not_reach_each_other_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(2, monkeypatch)
    reach = {(0, 1): True, (1, 0): True}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: reach[a, b])
    assert [each.subject for each in doctor._gpus()] == ["GPU", "GPU"]
    reach[1, 0] = False
    *_, links = doctor._gpus()
    assert links.subject == "GPU links" and "NCCL_SHM_USE_CUDA_MEMCPY=1" in links.text and not links.advice


def test_horovods_features_are_those_it_tells_of_itself() -> None:
    import horovod.torch as hvd

    text = finding("Horovod").text
    assert ("by Gloo" in text) == hvd.gloo_built() and ("NCCL" in text) == bool(hvd.nccl_built())


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a strange host name was NOT tried: needs root")
def test_a_host_name_that_does_not_resolve_is_a_problem() -> None:
    command = f"hostname nowhere-{os.getpid()} && exec {sys.executable} -m gradcomp doctor"
    done = subprocess.run(["unshare", "--uts", "sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"!!  host name    nowhere-{os.getpid()}, which does not resolve" in done.stdout
    assert f"as root, add this line to /etc/hosts: 127.0.1.1 nowhere-{os.getpid()}" in done.stdout


def test_without_horovod_the_rest_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", failing(ModuleNotFoundError("No module named 'horovod'", name="horovod")))
    assert finding("Horovod") == (
        "Horovod",
        "not installed: gradcomp.ddp and the simulator work, gradcomp.horovod does not",
        "",
    )


def test_an_older_torch_serves_no_fsdp2_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.8 has fully_shard(), and no set_custom_reduce_scatter()."""
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter")
    for name in ("gradcomp.fsdp", "gradcomp.networks.sharded"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(gradcomp, "fsdp", raising=False)
    found = finding("FSDP2")
    assert found.text.startswith("not served: gradcomp.fsdp needs torch 2.9 or newer") and not found.advice


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: _ZN3c10"),
        ModuleNotFoundError("No module named 'cloudpickle'", name="cloudpickle"),
        ModuleNotFoundError("No module named 'horovod.torch'", name="horovod.torch"),
        OSError("libmpi.so.40: cannot open shared object file"),
    ],
    ids=lambda error: str(error),
)
def test_a_horovod_that_cannot_be_imported_is_a_problem(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", failing(error))
    found = finding("Horovod")
    assert found.text == f"broken: {error}"
    assert found.advice == "it cannot be imported; install it again beside this torch"


def failing(error: Exception) -> Any:
    """An import that fails for gradcomp's network of Horovod."""
    real = builtins.__import__

    def load(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name == "gradcomp.networks" and fromlist and "horovod" in fromlist:
            raise error
        return real(name, globals, locals, fromlist, level)

    return load


def test_a_horovod_of_another_shape_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.torch import optimizer

    monkeypatch.setattr(optimizer._DistributedOptimizer, "_allreduce_grad_async", lambda self, p, name: None)
    assert "gradients take the slower carrier route" in finding("Horovod").advice


def test_a_gpu_that_is_too_old_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "BUILT_WITH_CUDA", True)
    for capability, advice in ((6, "the kernels need capability 7.0; use another GPU"), (7, "")):
        has_gpus(1, monkeypatch, capability)
        assert finding("GPU") == ("GPU", f"0: GPU, capability {capability}.0", advice)


def test_a_gpu_without_cuda_kernels_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(1, monkeypatch)
    monkeypatch.setattr(extension, "BUILT_WITH_CUDA", False)
    found = finding("GPU")
    assert found.text == "0: GPU, capability 9.0" and "a CUDA tensor raises an error" in found.advice
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert "Problems:\n  GPU: this build has no CUDA kernels" in doctor.report()


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """A checkout's folder in which no extension is built."""
    package = Path(gradcomp.__file__).parent
    shutil.copytree(package, tmp_path / "checkout" / "gradcomp", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path / "checkout"


def said_by(folder: Path, *words: str, installed: Path | None = None) -> tuple[int, str]:
    """Run a command of gradcomp in a folder; another gradcomp is installed elsewhere, if at all."""
    program = f"""
import os, runpy, sys
others = [place for place in sys.path[1:] if not os.path.isdir(place + "/gradcomp")]
sys.path[1:] = others + {[str(installed)] if installed else []}
sys.argv = {["gradcomp", *words]}
runpy.run_module("gradcomp", run_name="__main__")"""
    own = os.environ | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=own, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("broken", [False, True], ids=["missing", "broken"])
def test_the_commands_answer_where_the_extension_does_not_load(broken: bool, unbuilt: Path) -> None:
    if broken:
        (unbuilt / "gradcomp" / Path(extension.native.__file__).name).write_text("of another machine")
    status, said = said_by(unbuilt, "doctor")
    assert status == 1 and f"from {unbuilt / 'gradcomp'}" in said
    assert re.search(
        r"^!!  extension +not loaded: " + ("" if broken else "No module named 'gradcomp._native'"), said, re.MULTILINE
    )
    assert "\n  extension: build it with scripts/setup or `pip install .`" in said
    assert said_by(unbuilt, "list") == (0, subprocess.check_output([sys.executable, "-m", "gradcomp", "list"], text=True))
    assert said_by(unbuilt, "describe", "topk:ratio=0.1")[0] == 0


def test_a_checkout_in_front_of_what_is_installed_is_named(unbuilt: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    (installed / "gradcomp").mkdir(parents=True)
    (installed / "gradcomp" / "_native.so").touch()
    remedy = (
        f"Python takes the checkout {unbuilt} in place of the gradcomp in {installed}: keep and start your script elsewhere"
    )
    assert f"\n  extension: {remedy}" in said_by(unbuilt, "doctor", installed=installed)[1]
    own = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", "import gradcomp; gradcomp.make('topk')"]
    done = subprocess.run(words, cwd=unbuilt, env=own, capture_output=True, text=True)
    assert f"cannot be loaded (No module named 'gradcomp._native'): {remedy}" in done.stderr
