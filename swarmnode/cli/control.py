"""Commands that control a running node through a Unix socket in its data directory. HTTP cannot
control a node."""

from __future__ import annotations

import time

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load_data_dir, print_result


def pause(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Pause training after the current step, until `swarmnode resume`. The node stays connected and
    sends its weights to peers, but serves no groups.

    The pause outlasts restarts of the node. The model stays loaded. Stop the node to free the
    memory."""
    from swarmnode.daemon import control

    answer = control.send_command(load_data_dir(node), "pause")
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(answer.paused_since))
    now = "the node pauses after the current step; `swarmnode resume` continues training"
    text = now if answer.changed else f"the node is already paused, since {since}"
    return print_result(
        {"changed": answer.changed, "paused_since": answer.paused_since}, text, json
    )


def resume(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Resume training after `swarmnode pause`."""
    from swarmnode.daemon import control

    answer = control.send_command(load_data_dir(node), "resume")
    text = "the node continues training" if answer.changed else "the node was not paused"
    return print_result(
        {"changed": answer.changed, "paused_since": answer.paused_since}, text, json
    )
