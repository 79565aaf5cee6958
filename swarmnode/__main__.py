"""Entry point of `swarmnode`. It imports no large package, see `swarmnode.cli`."""

from __future__ import annotations

import sys


def main() -> int:
    from swarmnode import environment

    environment.restart_if_needed()
    environment.prepare()
    from swarmnode.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
