"""The command line of scripts/lab: finds the subcommand, reads its options, and turns a refusal into a sentence."""

from __future__ import annotations

import argparse
import ast
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from laboratory.options import Refused, suggest

# What each subcommand is for, as its file says.
SUBCOMMANDS = {
    path.stem: str(ast.get_docstring(ast.parse(path.read_text()))).partition("\n")[0]
    for path in sorted(Path(__file__).with_name("commands").glob("[a-z]*.py"))
}
USAGE = "usage: scripts/lab SUBCOMMAND [options]\n       scripts/lab SUBCOMMAND --help\n\nMeasures gradcomp.\n\nsubcommands:\n"

# The options that name a folder or a file.
FOLDERS = ("--out", "--cache", "--data", "--before", "--after", "--horovod", "--transformers", "--text")


def main(arguments: Sequence[str]) -> int:
    """Run a subcommand. Return 0, 1 if ranks failed or a bound does not hold, 2 if the command cannot be carried out."""
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:12} {help_}" for name, help_ in SUBCOMMANDS.items())
        print(USAGE + listed, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        print(f"lab: unknown subcommand {name!r}{suggest(name, SUBCOMMANDS)}; known: {', '.join(SUBCOMMANDS)}", file=sys.stderr)
        return 2
    try:
        return _run(name, rest)
    except KeyboardInterrupt:
        print(f"\nlab {name}: interrupted; finished runs and launches are kept, no result is written", file=sys.stderr)
        return 130  # as shells say of SIGINT


def without_folders(arguments: Sequence[str]) -> list[str]:
    """Leave out the options that name a folder or a file: a result file records no path of the machine."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith(tuple(f"{option}=" for option in FOLDERS)):
            skip = False
        elif argument in FOLDERS:
            skip = True
        else:
            kept.append(argument)
    return kept


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        module = importlib.import_module(f"laboratory.commands.{name}")
    except ModuleNotFoundError as error:
        print(
            f"lab {name}: the Python package {error.name} is missing for {sys.executable}; run scripts/setup, "
            "then activate its environment: . .venv/bin/activate",
            file=sys.stderr,
        )
        return 2
    from laboratory.ranks import RanksFailed

    parser = argparse.ArgumentParser(
        prog=f"scripts/lab {name}",
        description=module.__doc__,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_options(parser)
    chosen = parser.parse_args(arguments)
    chosen.subcommand, chosen.command = name, shlex.join(["scripts/lab", name, *without_folders(arguments)])
    try:
        return int(module.run(chosen))
    except Refused as error:
        print(f"lab {name}: {error}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(f"lab {name}: {error}", file=sys.stderr)
        return 1
