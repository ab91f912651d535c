"""python -m gradcomp: list the compressors, or describe one."""

from __future__ import annotations

import argparse

from gradcomp.spec import describe, names, summary


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m gradcomp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all compressors, with a line of what each does")
    one = commands.add_parser("describe", help="what a compressor does, and its knobs")
    one.add_argument("name", help="as list has it")
    asked = parser.parse_args(arguments)
    if asked.command == "list":
        for name in names():
            print(f"{name:14}{summary(name)}")
        return
    try:
        print(describe(asked.name))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
