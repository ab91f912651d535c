"""Run other projects' programs on two CPU ranks, as their authors wrote them and with one line more, and record the outcomes.

Their sources stay outside this repository: pass the checkouts of those that no package has.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from laboratory import machine, options, report
from laboratory.machine import ROOT

# All entries are sent, in full precision, and nothing is kept: the exchange is plain's.
EXACT = "topk:ratio=1,momentum=0,wire=exact"
TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node 2"
ATTACHED = "-m laboratory.strangers.attached"
# The tests of torch.testing._internal.distributed.distributed_test that need neither a GPU nor another hook.
TORCH_TESTS = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
)
SECONDS = 300

EXAMPLES = """\
examples:
  scripts/lab strangers --horovod ~/horovod --timm ~/pytorch-image-models
  scripts/lab strangers --programs accelerate-sync
  scripts/lab strangers --programs run-clm --transformers ~/transformers --text tinyshakespeare.txt

The Python that runs this needs accelerate for its programs, timm and torchvision for timm's, and transformers, datasets and
evaluate for run_clm.py. A program that cannot be started is recorded with the reason. The exit status is 1 if a program fails
with the line and not without it."""


class Program(NamedTuple):
    """A program: the specs it runs with, beside none, the package it belongs to, and its command, made by a function.

    command: gets the options, the spec and a folder for results. read: gets the folder, returns the outcome.
    """

    specs: tuple[str, ...]
    package: str
    command: Callable[[argparse.Namespace, str, Path], str]
    read: Callable[[Path], dict[str, Any]]


def horovod_tests(chosen: argparse.Namespace, spec: str, folder: Path) -> str:
    """Select the tests that make a DistributedOptimizer."""
    file = _source(chosen.horovod, "--horovod", "test/parallel/test_torch.py")
    tests = re.split(r"^    def (test_\w+)", file.read_text(), flags=re.MULTILINE)
    names = [name for name, body in zip(tests[1::2], tests[2::2], strict=True) if "hvd.DistributedOptimizer(" in body]
    _need("mock")
    return (
        f"horovodrun -np 2 --gloo python {ATTACHED} '{spec}' -m pytest -q -p no:cacheprovider -W default -c /dev/null "
        f"--junit-xml={folder}/{{rank}}.xml {file} -k '{' or '.join(names)}'"
    )


def torch_tests(chosen: argparse.Namespace, spec: str, folder: Path) -> str:
    """Run torch's tests, which start processes of their own."""
    file = ROOT / "scripts" / "laboratory" / "strangers" / "torch_tests.py"
    selected = " ".join(f"{file}::TestDDP::{name}" for name in TORCH_TESTS)
    return (
        f"env GRADCOMP_SPEC='{spec}' python -m pytest -q -p no:cacheprovider -W default -c /dev/null "
        f"--junit-xml={folder}/0.xml {selected}"
    )


def accelerates(script: str) -> Callable[[argparse.Namespace, str, Path], str]:
    """Run one of the scripts in Accelerate's package."""

    def command(chosen: argparse.Namespace, spec: str, folder: Path) -> str:
        _need("accelerate")
        run = "env ACCELERATE_USE_CPU=true python -m torch.distributed.run --standalone --nproc-per-node 2"
        return f"{run} {ATTACHED} '{spec}' -m accelerate.test_utils.scripts.{script}"

    return command


def clm_training(chosen: argparse.Namespace, spec: str, folder: Path) -> str:
    """Train a GPT-2 of two small layers on a text, of which bytes are the tokens."""
    file = _source(chosen.transformers, "--transformers", "examples/pytorch/language-modeling/run_clm.py")
    if chosen.text is None:
        raise options.Refused("pass --text FILE, which run_clm.py trains on")
    _need("transformers", "accelerate", "datasets", "evaluate")
    make_tiny_gpt(folder / "tiny")
    (folder / "text.txt").write_text(chosen.text.read_text()[:300_000])
    return (
        f"env HF_HUB_OFFLINE=1 HF_HOME={folder} {TORCHRUN} {ATTACHED} '{spec}' {file} --config_name {folder}/tiny "
        f"--tokenizer_name {folder}/tiny --train_file {folder}/text.txt --block_size 64 --do_train --use_cpu --max_steps 30 "
        f"--logging_steps 1 --per_device_train_batch_size 8 --learning_rate 3e-3 --report_to none --output_dir {folder}/run"
    )


def timm_training(chosen: argparse.Namespace, spec: str, folder: Path) -> str:
    """Train timm's smallest ResNet on drawn images of two classes."""
    file = _source(chosen.timm, "--timm", "train.py")
    _need("timm", "torchvision")
    draw_images(folder / "images")
    return (
        f"{TORCHRUN} {ATTACHED} '{spec}' {file} --data-dir {folder}/images --device cpu "
        f"--model test_resnet.r160_in1k --num-classes 2 --img-size 32 -b 16 -vb 16 -j 1 --opt sgd --lr 0.05 --momentum 0.9 "
        f"--clip-grad 1.0 --epochs 4 --warmup-epochs 0 --cooldown-epochs 0 --seed 1 --output {folder} --experiment run"
    )


def read_tests(folder: Path) -> dict[str, Any]:
    """Count the tests of all ranks. One that failed on any rank has failed."""
    outcomes: dict[str, str] = {}
    for file in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            said = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
            found = "passed" if said is None else "skipped" if said.tag == "skipped" else f"failed: {_sentence(said)}"
            if not outcomes.get(name := str(case.get("name")), "").startswith("failed"):
                outcomes[name] = found
    failed = {name: found for name, found in outcomes.items() if found.startswith("failed")}
    counted = [*outcomes.values()]
    return {"passed": counted.count("passed"), "skipped": counted.count("skipped"), "failed": failed}


def read_timm(folder: Path) -> dict[str, Any]:
    """Return the losses of the last epoch."""
    with (folder / "run" / "summary.csv").open() as file:
        last = [*csv.DictReader(file)][-1]
    return {"train_loss": round(float(last["train_loss"]), 4), "eval_top1": round(float(last["eval_top1"]), 2)}


def read_clm(folder: Path) -> dict[str, Any]:
    """Return the first and the last step's loss."""
    log = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    losses = [each["loss"] for each in log if "loss" in each]
    return {"first_loss": round(losses[0], 4), "train_loss": round(losses[-1], 4)}


PROGRAMS = {
    "horovod-tests": Program((EXACT, "topk"), "horovod", horovod_tests, read_tests),
    "torch-tests": Program(("dense", EXACT), "torch", torch_tests, read_tests),
    "accelerate-sync": Program(("dense", EXACT), "accelerate", accelerates("test_sync"), lambda folder: {}),
    "accelerate-comm-hook": Program(("dense",), "accelerate", accelerates("test_ddp_comm_hook"), lambda folder: {}),
    "run-clm": Program((EXACT, "topk"), "transformers", clm_training, read_clm),
    "timm-train": Program(("topk",), "timm", timm_training, read_timm),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    known = ", ".join(PROGRAMS)
    parser.add_argument("--programs", type=_known, default=[*PROGRAMS], help=f"separated by commas (default: {known})")
    parser.add_argument("--horovod", type=Path, metavar="CHECKOUT", help="Horovod's sources, for its tests")
    parser.add_argument("--transformers", type=Path, metavar="CHECKOUT", help="transformers' sources, for their run_clm.py")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text for run_clm.py, such as tinyshakespeare")
    parser.add_argument("--timm", type=Path, metavar="CHECKOUT", help="timm's sources, for its train.py")
    options.add_places(parser, "none")


def run(chosen: argparse.Namespace) -> int:
    """Run all programs, and write the table and the record."""
    lines = [line for name in chosen.programs for line in outcomes_of(name, chosen)]
    report.save(chosen, None, {"ranks": 2, "lines": lines})
    print(report.columns([["program", "spec", "outcome"], *([x["program"], x["spec"], summary(x)] for x in lines)]))
    return int(any(line["worse"] for line in lines))


def outcomes_of(name: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a program without the line, and with each spec. A line is worse if the program fails with it, or in more tests."""
    program, lines = PROGRAMS[name], list[dict[str, Any]]()
    for spec in ("", *program.specs):
        line: dict[str, Any] = {
            "program": name,
            "package": program.package,
            "version": machine.version(program.package),
            "spec": spec,
        }
        with tempfile.TemporaryDirectory() as folder:
            try:
                command = program.command(chosen, spec, Path(folder))
            except options.Refused as reason:
                return [{**line, "not_run": str(reason), "worse": False}]
            line |= started(command, Path(folder), program.read)
            line["command"] = _without_paths(command, chosen, folder)
        stock = lines[0] if lines else line
        failed = set(line.get("failed", ())) - set(stock.get("failed", ()))
        line["worse"] = bool(failed) or (line["status"] != 0 and stock["status"] == 0)
        lines.append(line)
        print(name, spec or "without the line", summary(line), sep="  ", file=sys.stderr, flush=True)
    return lines


def started(command: str, folder: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Run a command. Return its exit status, its time, and the outcome or the error's text."""
    began = time.monotonic()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        done = subprocess.run(
            shlex.split(command), env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS
        )
        status, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        status, said = -1, f"it did not end within {SECONDS} s"
    found: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - began)}
    try:
        found |= read(folder)
    except (OSError, IndexError) as error:
        found["error"] = str(error)
    if status:
        errors = re.findall(r"^.*?((?:\w+\.)*\w*(?:Error|Exception): .*)$", said, re.MULTILINE)
        found["error"] = next((x for x in errors if "ChildFailed" not in x), said[-300:])[:500]
        print(said[-6000:], file=sys.stderr)
    return found


def summary(line: dict[str, Any]) -> str:
    """Say a line's outcome in a few words."""
    if "not_run" in line:
        return f"not run: {line['not_run']}"
    parts = [f"{line[key]} {key}" for key in ("passed", "skipped") if key in line]
    parts += [f"{len(line['failed'])} failed"] if "failed" in line else []
    parts += [f"{key} {line[key]}" for key in ("first_loss", "train_loss", "eval_top1") if key in line]
    return ", ".join(parts) or ("passed" if line["status"] == 0 else f"failed: {line['error'][:100]}")


def draw_images(folder: Path) -> None:
    """Draw images of two classes that differ in color."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(1)
    for part, count in (("train", 128), ("validation", 32)):
        for label in range(2):
            (folder / part / str(label)).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = random.integers(0, 200, (32, 32, 3))
                pixels[..., label] += 20
                Image.fromarray(pixels.astype("uint8")).save(folder / part / str(label) / f"{number}.png")


def make_tiny_gpt(folder: Path) -> None:
    """Write the configuration of a small GPT-2, and a tokenizer of bytes."""
    import tokenizers
    import transformers

    end = "<|endoftext|>"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [], tokenizers.trainers.BpeTrainer(vocab_size=257, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, bos_token=end).save_pretrained(folder)
    sizes = {
        "vocab_size": 257,
        "n_positions": 64,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    transformers.GPT2Config(**sizes).save_pretrained(folder)


def _source(checkout: Path | None, option: str, file: str) -> Path:
    if checkout is None:
        raise options.Refused(f"pass {option} CHECKOUT, which has {file}")
    if not (path := checkout.resolve() / file).is_file():
        raise options.Refused(f"{option} has no {file}")
    return path


def _need(*packages: str) -> None:
    if lacking := [package for package in packages if find_spec(package) is None]:
        raise options.Refused(f"this Python has no {' and no '.join(lacking)}: pip install {' '.join(lacking)}")


def _without_paths(command: str, chosen: argparse.Namespace, folder: str) -> str:
    sources = {"HOROVOD": chosen.horovod, "TIMM": chosen.timm, "TRANSFORMERS": chosen.transformers}
    for name, path in {"FOLDER": folder, **sources, ".": ROOT}.items():
        if path is not None:
            command = command.replace(str(Path(path).resolve()), name)
    return command


def _known(text: str) -> list[str]:
    def check(name: str) -> str:
        if name not in PROGRAMS:
            raise argparse.ArgumentTypeError(f"unknown program {name!r}{options.suggest(name, PROGRAMS)}")
        return name

    return options.listed(text, check)


def _sentence(said: ElementTree.Element) -> str:
    return str(said.get("message", "")).partition("\n")[0][:300]
