"""`python -m sinkcache`: the command line. `plan` alone starts without torch, which takes seconds to import."""

import sys

from sinkcache.planner import command


def main() -> int:
    """Runs the command that is named first; returns the exit code."""
    if sys.argv[1:2] == ["plan"]:
        return command.main(sys.argv[2:])
    from sinkcache import cli  # imports torch and transformers

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
