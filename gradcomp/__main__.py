"""Gradient compression for distributed training: list the compressors, predict step times, look for problems."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable

from gradcomp import native
from gradcomp._version import VERSION

# The commands, and what each does. Only those that run import torch.
COMMANDS = {
    "list": "list all compressors, with a line about each",
    "describe": "describe a compressor and its knobs, or a whole spec",
    "doctor": "show versions, build, GPU, Horovod and host name; exit with 1 if there are problems",
    "predict": "predict step times on a cluster, with every compressor and without",
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command of the command line.

    arguments: the words after `gradcomp`; those of this process by default.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="gradcomp", description=__doc__)
    parser.add_argument("--version", action="version", version=f"gradcomp {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    own = {name: commands.add_parser(name, help=text) for name, text in COMMANDS.items()}
    own["describe"].add_argument("spec", help='a compressor\'s name, as shown by list, or a spec: "topk:ratio=0.01"')
    own["doctor"].add_argument("--json", action="store_true", help="print the findings as JSON")
    if words[:1] == ["predict"]:
        from gradcomp.prediction import command as prediction

        prediction.add_options(own["predict"])
    elif words and not words[0].startswith("-") and words[0] not in own:
        near = difflib.get_close_matches(words[0], own, 1)
        parser.error(f"there is no command {words[0]!r}; " + (f"did you mean {near[0]}?" if near else f"take {', '.join(own)}"))
    options = parser.parse_args(words)
    native.only_looks = options.command in ("list", "describe", "doctor")
    try:
        if options.command == "list":
            _list()
        elif options.command == "doctor":
            _doctor(options.json)
        elif options.command == "predict":
            prediction.run(options)
        else:
            from gradcomp.spec import describe

            print(describe(options.spec))
    except ValueError as error:
        parser.error(str(error))


def _list() -> None:
    from gradcomp.spec import AUTO, kind_of, names, summary

    print("Recommended\n")
    suited = [(name, text) for name in names() if (text := kind_of(name).suits)]
    _print_table([(AUTO, "measures and chooses, while the first steps train"), *suited])
    print("\nAll compressors; gradcomp describe NAME says more\n")
    _print_table((name, summary(name)) for name in names())


def _print_table(lines: Iterable[tuple[str, str]]) -> None:
    for name, text in lines:
        print(textwrap.fill(f"{name:14}{text}", min(shutil.get_terminal_size().columns, 128), subsequent_indent=14 * " "))


def _doctor(as_json: bool) -> None:
    from gradcomp import doctor

    found = doctor.findings()
    print(json.dumps([each._asdict() for each in found], indent=1) if as_json else doctor.report(found))
    if any(each.advice for each in found):
        sys.exit(1)


def run() -> None:
    """Run the command. Report a closed pipe or a full disk in one line."""
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has enough
        _drop_output()
    except OSError as error:
        _drop_output()
        sys.exit(f"gradcomp: cannot write the answer: {error.strerror}")


def _drop_output() -> None:
    # Python writes what is left when it ends, and would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run()
