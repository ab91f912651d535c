"""Run other projects' programs on two CPU ranks, as their authors wrote them and with one line more, and record the outcomes.

Their sources stay outside this repository: pass the checkouts of those that no package has.
"""

from __future__ import annotations

import argparse
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
ATTACHED = "-m laboratory.strangers.attached '{spec}'"
PYTEST = "-m pytest -q -p no:cacheprovider -W default -c /dev/null --junit-xml={folder}/"
# The tests of torch.testing._internal.distributed.distributed_test that need neither a GPU nor another hook.
TORCH_FILE = "scripts/laboratory/strangers/torch_tests.py"
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
  scripts/lab strangers --horovod ~/horovod
  scripts/lab strangers --programs accelerate-sync
  scripts/lab strangers --programs torchft-diloco --name torchft
  scripts/lab strangers --programs run-clm --transformers ~/transformers --text tinyshakespeare.txt

The Python that runs this needs accelerate for its program, and transformers, datasets and evaluate for run_clm.py. A program
that cannot be started is recorded with the reason. The exit status is 1 if a program fails with the line and not without it."""


class Program(NamedTuple):
    """A program: the specs it runs with, beside none, the package it belongs to, and its command.

    read: gets the folder of results, returns the outcome. needs: packages. source: a file of the checkout that the option of
    the package's name names. prepare: gets the options, the folder and this file, and returns what else the command takes.
    """

    specs: tuple[str, ...]
    package: str
    command: str
    read: Callable[[Path], dict[str, Any]] = lambda folder: {}
    needs: tuple[str, ...] = ()
    source: str = ""
    prepare: Callable[[argparse.Namespace, Path, Path], dict[str, str]] = lambda chosen, folder, file: {}


def optimizers_tests(chosen: argparse.Namespace, folder: Path, file: Path) -> dict[str, str]:
    """Select the tests that make a DistributedOptimizer."""
    tests = re.split(r"^    def (test_\w+)", file.read_text(), flags=re.MULTILINE)
    names = [name for name, body in zip(tests[1::2], tests[2::2], strict=True) if "hvd.DistributedOptimizer(" in body]
    return {"selected": " or ".join(names)}


def tiny_gpt(chosen: argparse.Namespace, folder: Path, file: Path) -> dict[str, str]:
    """Write a text, the configuration of a GPT-2 of two small layers, and a tokenizer of bytes."""
    import tokenizers
    import transformers

    if chosen.text is None:
        raise options.Refused("pass --text FILE, which run_clm.py trains on")
    (folder / "text.txt").write_text(chosen.text.read_text()[:300_000])
    end, tiny = "<|endoftext|>", folder / "tiny"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, bos_token=end).save_pretrained(tiny)
    sizes = {"vocab_size": 257, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(tiny)
    return {}


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


def read_clm(folder: Path) -> dict[str, Any]:
    """Return the first and the last step's loss."""
    log = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    losses = [each["loss"] for each in log if "loss" in each]
    return {"first_loss": round(losses[0], 4), "train_loss": round(losses[-1], 4)}


def read_local_steps(folder: Path) -> dict[str, Any]:
    """Return what local steps came to."""
    return dict(json.loads((folder / "found.json").read_text()))


PROGRAMS = {
    "horovod-tests": Program(
        (EXACT, "topk"),
        "horovod",
        f"horovodrun -np 2 --gloo python {ATTACHED} {PYTEST}{{rank}}.xml {{file}} -k '{{selected}}'",
        read_tests,
        ("mock",),
        "test/parallel/test_torch.py",
        optimizers_tests,
    ),
    "torch-tests": Program(
        ("dense", EXACT),
        "torch",
        f"env GRADCOMP_SPEC='{{spec}}' python {PYTEST}0.xml "
        + " ".join(f"{ROOT / TORCH_FILE}::TestDDP::{name}" for name in TORCH_TESTS),
        read_tests,
    ),
    "accelerate-sync": Program(
        ("dense", EXACT),
        "accelerate",
        f"env ACCELERATE_USE_CPU=true {TORCHRUN} {ATTACHED} -m accelerate.test_utils.scripts.test_sync",
        needs=("accelerate",),
    ),
    "run-clm": Program(
        (EXACT, "topk"),
        "transformers",
        f"env HF_HUB_OFFLINE=1 HF_HOME={{folder}} {TORCHRUN} {ATTACHED} {{file}} --config_name {{folder}}/tiny "
        "--tokenizer_name {folder}/tiny --train_file {folder}/text.txt --block_size 64 --do_train --use_cpu --max_steps 30 "
        "--logging_steps 1 --per_device_train_batch_size 8 --learning_rate 3e-3 --report_to none --output_dir {folder}/run",
        read_clm,
        ("transformers", "accelerate", "datasets", "evaluate"),
        "examples/pytorch/language-modeling/run_clm.py",
        tiny_gpt,
    ),
    "torchft-diloco": Program(
        ("dense", "sign"),
        "torchft",
        f"{TORCHRUN} -m laboratory.strangers.local_steps '{{spec}}' {{folder}}/found.json",
        read_local_steps,
        ("torchft",),
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    programs = f"separated by commas (default: {', '.join(PROGRAMS)})"
    parser.add_argument("--programs", type=options.some_of(PROGRAMS), default=[*PROGRAMS], help=programs)
    parser.add_argument("--horovod", type=Path, metavar="CHECKOUT", help="Horovod's sources, for its tests")
    parser.add_argument("--transformers", type=Path, metavar="CHECKOUT", help="transformers' sources, for their run_clm.py")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text for run_clm.py, such as tinyshakespeare")
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
        line: dict[str, Any] = {"program": name, "package": program.package, "version": machine.version(program.package)}
        line["spec"] = spec
        with tempfile.TemporaryDirectory() as folder:
            try:
                command = command_of(program, chosen, spec, Path(folder))
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
    parts += [f"{key} {line[key]}" for key in ("first_loss", "train_loss", "perplexity", "bytes") if key in line]
    return ", ".join(parts) or ("passed" if line["status"] == 0 else f"failed: {line['error'][:100]}")


def command_of(program: Program, chosen: argparse.Namespace, spec: str, folder: Path) -> str:
    """Write a program's command, after what it needs has been prepared."""
    file = Path()
    if program.source:
        checkout = getattr(chosen, program.package)
        if checkout is None or not (file := checkout.resolve() / program.source).is_file():
            raise options.Refused(f"pass --{program.package} CHECKOUT, which has {program.source}")
    if lacking := [package for package in program.needs if find_spec(package) is None]:
        raise options.Refused(f"this Python has no {' and no '.join(lacking)}: pip install {' '.join(lacking)}")
    more = program.prepare(chosen, folder, file)
    return program.command.format(spec=spec, folder=folder, file=file, rank="{rank}", **more)


def _without_paths(command: str, chosen: argparse.Namespace, folder: str) -> str:
    sources = {"HOROVOD": chosen.horovod, "TRANSFORMERS": chosen.transformers}
    for name, path in {"FOLDER": folder, **sources, ".": ROOT}.items():
        if path is not None:
            command = command.replace(str(Path(path).resolve()), name)
    return command


def _sentence(said: ElementTree.Element) -> str:
    return str(said.get("message", "")).partition("\n")[0][:300]
