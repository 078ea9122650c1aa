"""The first hour on a card: `python -m lab [--only PATTERN] [--minutes MINUTES] [--small] [--json FILE]` (first_hour.py)."""

import argparse
import fnmatch
import sys

from lab import first_hour


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status, that of `first_hour.main`.

    argv   the arguments; None: those of the process
    """
    parser = argparse.ArgumentParser(prog="python -m lab", description="The first hour on a card.")
    parser.add_argument("--only", default="*", help="shell patterns for the names of stages, by semicolons")
    parser.add_argument("--minutes", type=float, default=9.0, help="what is not done by then is left out")
    parser.add_argument("--small", action="store_true", help="few tokens, to try it without a GPU")
    parser.add_argument("--json", metavar="FILE", help="write every answer there")
    args = parser.parse_args(argv)
    wanted = [name for name in first_hour.STAGES if any(fnmatch.fnmatch(name, p) for p in args.only.split(";"))]
    return first_hour.main(args.small, args.minutes, wanted, args.json)


if __name__ == "__main__":
    sys.exit(main())
