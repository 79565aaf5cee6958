"""Commands about configuration."""

from __future__ import annotations

import json as json_module
import sys
from typing import TYPE_CHECKING

from cyclopts import App

from swarmnode.cli.options import NODE, AsJson, NodeOptions, Peer, load
from swarmnode.errors import SwarmNodeError

if TYPE_CHECKING:
    from swarmnode.settings import Resolved

config_app = App(name="config", help="Configuration: what is set, and by what.")


@config_app.command(name="show")
def config_show(*, node: NodeOptions = NODE, peer: Peer = None, json: AsJson = False) -> int:
    """Every key with its value and where that was set."""
    rows = list(by_manifest(load(node, peers=peer)).rows())
    if json:
        print(json_module.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, default=str, indent=1))
        return 0
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{width}}  {value!s:<40}  {origin}")
    return 0


def by_manifest(resolved: Resolved) -> Resolved:
    """What a node would run with: values of the manifest in place of what was set, and said to be from there."""
    from swarmnode.settings import Resolved
    from swarmnode.swarm import manifest_store

    try:
        agreed, changes = manifest_store.honoured(resolved.config)
    except SwarmNodeError as error:
        print(f"swarmnode: without the manifest: {error}", file=sys.stderr)
        return resolved
    return Resolved(agreed, {**resolved.origins, **{change.key: f"manifest {agreed.swarm.id[:16]}…" for change in changes}})
