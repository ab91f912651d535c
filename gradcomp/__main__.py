"""The command line, python -m gradcomp: list the compressors, describe one, predict step times, look for problems."""

from __future__ import annotations

import argparse
import os
import sys

from gradcomp._version import VERSION
from gradcomp.doctor import report
from gradcomp.prediction import command as prediction
from gradcomp.spec import AUTO, describe, names, summary


def main(arguments: list[str] | None = None) -> None:
    """Run the command of the command line.

    arguments: the words after `python -m gradcomp`; those of this process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m gradcomp", description=__doc__)
    parser.add_argument("--version", action="version", version=f"gradcomp {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list all compressors, with a line about each")
    one = commands.add_parser("describe", help="describe a compressor and its knobs, or a whole spec")
    one.add_argument("spec", help='a compressor\'s name, as shown by list, or a spec: "topk:ratio=0.01"')
    commands.add_parser("doctor", help="show versions, build, GPU, Horovod and host name, and problems with them")
    prediction.add_options(commands.add_parser("predict", help="predict step times on a cluster, for every way to exchange"))
    options = parser.parse_args(arguments)
    if options.command == "list":
        for name in (*names(), AUTO):
            print(f"{name:14}{summary(name)}")
        return
    if options.command == "doctor":
        print(report())
        return
    try:
        if options.command == "predict":
            prediction.run(options)
            return
        print(describe(options.spec))
    except ValueError as error:
        parser.error(str(error))


def run() -> None:
    """Run the command. Report a closed pipe or a full disk in one line."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has enough
        _drop_output()
    except OSError as error:
        _drop_output()
        sys.exit(f"python -m gradcomp: cannot write the answer: {error.strerror}")


def _drop_output() -> None:
    # Python writes what is left when it ends, and would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run()
