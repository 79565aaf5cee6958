"""Completion of the command line in a shell."""

from __future__ import annotations

from typing import Literal

from swarmnode.cli.options import Flag
from swarmnode.errors import ConfigError, Unavailable


def completion(
    shell: Literal["bash", "zsh", "fish"] | None = None, *, install: Flag = False
) -> int:
    """Print what makes a shell complete this program's commands and options, or install it.

    Parameters
    ----------
    shell
        Without it, the shell that this was typed in.
    install
        Write it where the shell looks for it, and for bash and zsh one line into ~/.bashrc or
        ~/.zshrc. Again after an upgrade.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    from swarmnode.cli import app

    if shell is None:
        try:
            found = detect_shell()
        except ShellDetectionError:
            found = "powershell"
        if found == "powershell":
            raise ConfigError("completion: which shell? `swarmnode completion bash`, zsh or fish")
        shell = found
    if not install:
        print(app.generate_completion(shell=shell), end="")
        return 0
    try:
        written = app.install_completion(shell=shell)
    except OSError as error:
        raise Unavailable(f"completion: cannot write {error.filename}: {error.strerror}") from None
    print(f"written: {written}; it counts from the next {shell} on")
    return 0
