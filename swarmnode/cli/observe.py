"""Commands that look at a running node."""

from __future__ import annotations

from swarmnode.cli.options import AsJson, Url


def status(*, url: Url = "http://127.0.0.1:9464", json: AsJson = False) -> int:
    """What a running node says of itself."""
    from swarmnode.observe.top import status_command

    return status_command(url, json)


def top(*, url: Url = "http://127.0.0.1:9464") -> int:
    """A live view of a running node in the terminal."""
    from swarmnode.observe.top import top_command

    top_command(url)
    return 0
