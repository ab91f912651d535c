"""The command line, python -m gradcomp: list the compressors, or describe one."""

from __future__ import annotations

import argparse

from gradcomp.spec import describe, names, summary


def main(arguments: list[str] | None = None) -> None:
    """Run the command of the command line.

    arguments: the words after `python -m gradcomp`; those of this process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m gradcomp", description="Lists the compressors, or describes one.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list all compressors, with a line about each")
    one = commands.add_parser("describe", help="describe a compressor and its knobs")
    one.add_argument("name", help="a compressor's name, as shown by list")
    options = parser.parse_args(arguments)
    if options.command == "list":
        for name in names():
            print(f"{name:14}{summary(name)}")
        return
    try:
        print(describe(options.name))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
