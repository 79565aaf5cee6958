"""`swarmnode serve-command`: how to start an inference server for this node."""

from __future__ import annotations

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load, say


def serve_command(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Print the command that starts a vLLM or SGLang server for this node's model, with the flags
    that policy.server needs."""
    from swarmnode.policy.engine import serve_command as commands
    from swarmnode.swarm import manifest_store

    config, _ = manifest_store.apply_stored(load(node).config)
    made = commands.serve_command(config)
    text = "\n".join([*(f"# {note}" for note in made.notes), made.line()])
    told = {
        "command": made.line(),
        "environment": made.environment,
        "arguments": made.arguments,
        "notes": made.notes,
    }
    return say(told, text, json)
