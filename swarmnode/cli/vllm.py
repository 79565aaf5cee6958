"""`swarmnode vllm-command`: the command that starts a vLLM server for this node."""

from __future__ import annotations

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load, print_result


def vllm_command(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Print a command that starts vLLM with this node's model and the flags that the node needs."""
    from swarmnode.policy.engine import vllm_command as commands
    from swarmnode.swarm import manifest_store

    config, _ = manifest_store.apply_stored(load(node).config)
    server = commands.vllm_command(config)
    text = "\n".join([*(f"# {note}" for note in server.notes), server.line()])
    result = {
        "command": server.line(),
        "environment": server.environment,
        "arguments": server.arguments,
        "notes": server.notes,
    }
    return print_result(result, text, json)
