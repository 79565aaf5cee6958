"""The command line: one module per group of commands, with shared options in `options`.

Commands import large packages only when they run, so that `--help` answers in half a second.
"""

from __future__ import annotations

import errno
import os
import sys

from cyclopts import App, CycloptsError

from swarmnode import __version__
from swarmnode.cli.config import config_app
from swarmnode.cli.control import pause, resume
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
from swarmnode.cli.observe import samples, status
from swarmnode.cli.plan import plan
from swarmnode.cli.swarm import init, join, manifest_app
from swarmnode.cli.talk import chat, serve
from swarmnode.cli.task import task_app
from swarmnode.cli.vllm import vllm_command
from swarmnode.errors import SwarmNodeError, Unavailable

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
app.command(doctor)
app.command(plan)
app.command(vllm_command)
app.command(status)
app.command(samples)
app.command(export_policy, name="export")
app.command(evaluate, name="eval")
app.command(chat)
app.command(serve)
app.command(rollback)
app.command(demo)
for group in (config_app, key_app, manifest_app, recipes_app, task_app):
    app.command(group)
app.register_install_completion_command()


USAGE_EXIT_CODE = 2
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Error numbers of a failed write to standard output."""


def run(argv: list[str]) -> int:
    """Run one command and return the exit code. A `SwarmNodeError` becomes one line on stderr."""
    try:
        result = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except CycloptsError as error:
        command = " ".join(["swarmnode", *(error.command_chain or ())])
        problem = " ".join(str(error).partition("Available commands:")[0].split()).rstrip(".")
        _print_error(f"{problem}; see `{command} --help`")
        return USAGE_EXIT_CODE
    except SwarmNodeError as error:
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is not None:
            _print_error(f"{error.filename}: {error.strerror}")
            return Unavailable.exit_code
        if error.errno not in OUTPUT_ERRORS:
            raise
        # The interpreter flushes standard output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # a reader such as `head` ended early
            return 0
        _print_error(f"cannot write to standard output: {error.strerror}")
        return Unavailable.exit_code


def _print_error(text: str) -> None:
    """Print an error to standard error, without control characters of a peer or server."""
    from swarmnode.observe.logs import clean_text

    text = "\n".join(clean_text(line) for line in f"swarmnode: {text}".split("\n"))
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
