"""argv to command: one file for each group of commands, and what they share in `options`.

Nothing heavy is imported before the command that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys

from cyclopts import App, CycloptsError

from swarmnode import __version__
from swarmnode.cli.completion import completion
from swarmnode.cli.config import config_app
from swarmnode.cli.control import finish, pause, resume
from swarmnode.cli.demo import demo
from swarmnode.cli.evaluate import evaluate
from swarmnode.cli.key import key_app
from swarmnode.cli.node import (
    bootstrap_node,
    doctor,
    export_policy,
    recipes_app,
    rollback,
    run_node,
)
from swarmnode.cli.observe import samples, status, top
from swarmnode.cli.plan import plan
from swarmnode.cli.swarm import init, join, manifest_app
from swarmnode.cli.task import task_app
from swarmnode.errors import SwarmNodeError

app = App(
    name="swarmnode",
    help=(
        "Post-train a language model together with strangers' machines, by reinforcement learning."
    ),
    version=__version__,
    version_flags=["--version", "-v"],
    help_format="plaintext",
)
app.command(run_node, name="run")
app.command(join)
app.command(init)
app.command(bootstrap_node, name="bootstrap")
app.command(pause)
app.command(resume)
app.command(finish)
app.command(doctor)
app.command(plan)
app.command(status)
app.command(top)
app.command(samples)
app.command(export_policy, name="export")
app.command(evaluate, name="eval")
app.command(rollback)
app.command(demo)
app.command(completion)
for group in (config_app, key_app, manifest_app, recipes_app, task_app):
    app.command(group)

USAGE_EXIT_CODE = 2


def run(argv: list[str]) -> int:
    """Run one command and return the process's exit code; our own errors become one line on
    stderr."""
    try:
        result = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except CycloptsError as error:
        command = " ".join(["swarmnode", *(error.command_chain or ())])
        what = " ".join(str(error).partition("Available commands:")[0].split()).rstrip(".")
        print(f"swarmnode: {what}; `{command} --help` tells what there is", file=sys.stderr)
        return USAGE_EXIT_CODE
    except SwarmNodeError as error:
        print(f"swarmnode: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `swarmnode config show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
