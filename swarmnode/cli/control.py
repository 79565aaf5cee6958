"""Commands by which a node's owner controls it while it runs: over a socket in its data directory,
never over HTTP."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load, say

WORDS = {
    "owner": "you paused it",
    "battery": "the machine runs on its battery",
    "busy": "other programs want the machine",
}


def pause(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Let a running node rest after the step that runs, until `swarmnode resume`. It stays
    connected and goes on serving peers.

    It rests over restarts of its processes and of the whole node. Its model stays loaded;
    `swarmnode finish` frees the memory."""
    from swarmnode.daemon import control

    answer = control.send_command(_data_dir(node), "pause")
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(answer.paused["owner"]))
    now = "the node rests after the step that runs; `swarmnode resume` goes on"
    text = now if answer.changed else f"it was paused already, since {since}"
    return say({"changed": answer.changed, "paused": answer.paused}, text, json)


def resume(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Let a node that was paused go on."""
    from swarmnode.daemon import control

    answer = control.send_command(_data_dir(node), "resume")
    text = "the node goes on" if answer.changed else "it was not paused"
    if answer.paused:
        done = "it is no longer paused by you" if answer.changed else text
        text = f"{done}, but rests: {', '.join(WORDS[each] for each in answer.paused)}"
    return say({"changed": answer.changed, "paused": answer.paused}, text, json)


def finish(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Let a running node finish its step, however long that takes, save and end. Returns when it
    has ended; Ctrl-C only stops waiting."""
    data_dir = _data_dir(node)
    from swarmnode.daemon import control

    control.send_command(
        data_dir,
        "finish",
        lambda: print("the step that runs is the last one; waiting for it", file=sys.stderr),
    )
    return say({"finished": True}, "the node has ended", json)


def _data_dir(node: NodeOptions) -> Path:
    return load(node, tasks=False).config.node.data_dir
