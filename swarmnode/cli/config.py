"""`swarmnode config`: show and change the configuration."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from cyclopts import App

from swarmnode.cli.options import (
    NODE,
    AsJson,
    NodeOptions,
    Peer,
    load,
    print_result,
)
from swarmnode.errors import ConfigError, SwarmNodeError

if TYPE_CHECKING:
    from swarmnode.settings import Resolved

config_app = App(name="config", help="Show and change the configuration.")


@config_app.command(name="show")
def config_show(*, node: NodeOptions = NODE, peer: Peer = None, json: AsJson = False) -> int:
    """Print all settings with their values and origins."""
    rows = list(apply_manifest(load(node, peers=peer)).rows())
    if json:
        print(
            json_module.dumps(
                {key: {"value": value, "origin": origin} for key, value, origin in rows},
                default=str,
                indent=1,
            )
        )
        return 0
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{width}}  {value!s:<40}  {origin}")
    return 0


@config_app.command(name="set")
def config_set(
    *setting: str, recipe: str | None = None, node: NodeOptions = NODE, json: AsJson = False
) -> int:
    """Save settings in the data directory. A running node uses them from its next start.

    Parameters
    ----------
    setting
        key=value with a key of docs/configuration.md. May be repeated.
    recipe
        Save the settings of this recipe too. `swarmnode recipes` lists the recipes.
    """
    from swarmnode import settings
    from swarmnode.cli.node import check_values
    from swarmnode.tasks.registry import check_names

    overrides = [*(node.set_ or []), *setting]
    if not overrides and recipe is None:
        raise ConfigError("config set: nothing to set; write KEY=VALUE")
    keys = [text.partition("=")[0].strip().replace("-", "_") for text in overrides]
    if "node.data_dir" in keys:
        raise ConfigError(
            "config set: node.data_dir cannot be saved in the directory itself: use -d, or set it"
            " in the user's config.toml"
        )
    sets_tasks = any(key.startswith("task.") for key in keys)
    resolved = load(replace(node, set_=overrides), tasks=sets_tasks, recipe=recipe)
    check_values(resolved)
    if sets_tasks:
        check_names(resolved.config.task.names)
    file = settings.save(resolved.config.node.data_dir, overrides, recipe)
    return print_result({"file": str(file)}, f"saved in {file}", json)


def apply_manifest(resolved: Resolved) -> Resolved:
    """Return the configuration that a node would run with: the manifest's values replace those of
    the node, and the origins name the manifest."""
    from swarmnode.settings import Resolved
    from swarmnode.swarm import manifest_store

    try:
        agreed, changes = manifest_store.apply_stored(resolved.config)
    except SwarmNodeError as error:
        print(f"swarmnode: the manifest is ignored: {error}", file=sys.stderr)
        return resolved
    origins = {change.key: f"manifest {agreed.swarm.id[:16]}…" for change in changes}
    return Resolved(agreed, resolved.origins | origins)
