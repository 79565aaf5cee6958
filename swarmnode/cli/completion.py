"""`swarmnode completion`: shell completion."""

from __future__ import annotations

from typing import Literal

from swarmnode.cli.options import Flag
from swarmnode.errors import ConfigError, Unavailable


def completion(
    shell: Literal["bash", "zsh", "fish"] | None = None, *, install: Flag = False
) -> int:
    """Print the completion script of a shell, or install it.

    Parameters
    ----------
    shell
        By default the current shell.
    install
        Write the script to the shell's completion directory. For bash and zsh, also add one line to
        ~/.bashrc or ~/.zshrc. Repeat this after an upgrade.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    from swarmnode.cli import app

    if shell is None:
        try:
            found = detect_shell()
        except ShellDetectionError:
            found = "powershell"
        if found == "powershell":
            raise ConfigError(
                "completion: unknown shell: run `swarmnode completion bash`, zsh or fish"
            )
        shell = found
    if not install:
        print(app.generate_completion(shell=shell), end="")
        return 0
    try:
        written = app.install_completion(shell=shell)
    except OSError as error:
        raise Unavailable(f"completion: cannot write {error.filename}: {error.strerror}") from None
    print(f"wrote {written}; completion works in new {shell} sessions")
    return 0
