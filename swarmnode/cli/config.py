"""Commands about configuration."""

from __future__ import annotations

import json as json_module
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from swarmnode.cli.options import NODE, AsJson, NodeOptions, Peer, load, say
from swarmnode.errors import ConfigError, SwarmNodeError, Unavailable

if TYPE_CHECKING:
    from swarmnode.settings import Resolved

config_app = App(name="config", help="Configuration: what is set, and by what.")


@config_app.command(name="show")
def config_show(*, node: NodeOptions = NODE, peer: Peer = None, json: AsJson = False) -> int:
    """Every key with its value and where that was set."""
    rows = list(by_manifest(load(node, peers=peer)).rows())
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


@config_app.command(name="path")
def config_path(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """The files that are read, those that are not there included; of two that set a key the later
    one counts."""
    from swarmnode import settings

    data_dir = load(node, tasks=False).config.node.data_dir
    named = node.config or (
        Path(os.environ["SWARMNODE_CONFIG"]) if os.environ.get("SWARMNODE_CONFIG") else None
    )
    files = (
        [settings.kept_file(data_dir), named]
        if named is not None
        else [settings.default_file(), settings.kept_file(data_dir)]
    )
    lines = [f"{file}{'' if file.exists() else '  (not there)'}" for file in files]
    return say({"files": [str(file) for file in files]}, "\n".join(lines), json)


@config_app.command(name="set")
def config_set(
    *setting: str, recipe: str | None = None, node: NodeOptions = NODE, json: AsJson = False
) -> int:
    """Keep settings for this data directory; a node that runs takes them at its next start.

    Parameters
    ----------
    setting
        key=value, any key of docs/configuration.md. May be repeated.
    recipe
        Keep all that it sets too; `swarmnode recipes` lists them.
    """
    from swarmnode import settings
    from swarmnode.cli.node import check_before_processes
    from swarmnode.tasks.registry import check_names

    asked = [*(node.set_ or []), *setting]
    if not asked and recipe is None:
        raise ConfigError("config set: nothing to set; write KEY=VALUE")
    if any(text.partition("=")[0].strip().replace("-", "_") == "node.data_dir" for text in asked):
        raise ConfigError(
            "config set: node.data_dir cannot be kept in the directory itself: name it with -d, or"
            " in the user's config.toml"
        )
    of_tasks = any(text.strip().startswith("task.") for text in asked)
    resolved = load(replace(node, set_=asked), tasks=of_tasks, recipe=recipe)
    check_before_processes(resolved)
    if of_tasks:
        check_names(resolved.config.task.names)
    file = settings.keep(resolved.config.node.data_dir, asked, recipe)
    return say({"file": str(file)}, f"kept in {file}", json)


@config_app.command(name="init")
def config_init(file: Path | None = None, *, json: AsJson = False) -> int:
    """Write a configuration file with every setting, all commented out, to begin with.

    Parameters
    ----------
    file
        Must not exist yet. Without it, config.toml in the user's configuration directory.
    """
    from swarmnode import settings

    target = file or settings.default_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "x", encoding="utf-8") as out:
            out.write(settings.template())
    except FileExistsError:
        raise Unavailable(
            f"{target} exists; `swarmnode config set` changes single settings"
        ) from None
    except OSError as error:
        raise Unavailable(f"cannot write {target}: {error.strerror}") from None
    return say({"file": str(target)}, f"written: {target}", json)


def by_manifest(resolved: Resolved) -> Resolved:
    """What a node would run with: values of the manifest in place of what was set, and said to be
    from there."""
    from swarmnode.settings import Resolved
    from swarmnode.swarm import manifest_store

    try:
        agreed, changes = manifest_store.apply_stored(resolved.config)
    except SwarmNodeError as error:
        print(f"swarmnode: without the manifest: {error}", file=sys.stderr)
        return resolved
    said = {change.key: f"manifest {agreed.swarm.id[:16]}…" for change in changes}
    return Resolved(agreed, resolved.origins | said)
