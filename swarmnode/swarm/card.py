"""The model card of an export."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode import __version__
from swarmnode.gguf import SMOLLM2, SMOLLM2_COMMAND, SMOLLM2_PACKAGE

HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
FILE = "README.md"
ABOUT_SMOLLM2 = (
    "SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), its Q4_1 quantisation of"
    f" {SMOLLM2_PACKAGE} dequantised to float32"
)
"""Base model of an export whose base is `smollm2`."""
LOADING_SMOLLM2 = (
    "The adapter names the directory in which the base model is on the machine of the export."
    f" Elsewhere, run `{SMOLLM2_COMMAND}`, then `swarmnode eval DIRECTORY`. An export with"
    " `--merge` needs no base model."
)
"""How to load an adapter whose base is `smollm2`."""


@dataclass(frozen=True)
class CardTask:
    """A task on which the policy was trained."""

    id: str
    version: str
    settings: str
    """JSON as in a manifest; for a dataset with the hash and the origin of its rows."""
    hub: str = ""
    """Name of the dataset on the Hub; empty if it is not from there."""


def card(
    export_info: Mapping[str, object], tasks: Sequence[CardTask], terms: Mapping[str, object]
) -> str:
    """Return the README.md of an export.

    Args:
        export_info: content of the export's swarmnode.json.
        tasks: the tasks trained on.
        terms: settings that decided the training, by key.
    """
    base = str(export_info["base"])
    about = ABOUT_SMOLLM2 if base == SMOLLM2 else base
    kind = "an adapter (LoRA)" if export_info["kind"] == "adapter" else "all weights"
    head: dict[str, object] = {
        "library_name": "peft" if export_info["kind"] == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["swarmnode", "reinforcement-learning", "grpo"],
    }
    if HUB_NAME.fullmatch(base):
        head |= {"base_model": base}
    datasets = sorted({task.hub for task in tasks if task.hub})
    if datasets:
        head |= {"datasets": datasets}
    reward = export_info["reward_held_out"]
    at = export_info["reward_held_out_step"]
    measured = (
        f"{reward:.4f}{'' if at is None else f' at step {at}'}, mean over the tasks below, at the"
        " training temperature"
        if isinstance(reward, float)
        else "not measured"
    )
    own, external = export_info["own_groups"], export_info["external_groups"]
    groups = f"{own} groups of its own and {external} of peers'"
    rows = [
        ("base model", f"{about}, fingerprint {str(export_info['base_fingerprint'])[:16]}…"),
        (
            "trained",
            f"{kind}, {export_info['step']} steps, policy version {export_info['policy_version']}",
        ),
        (
            "experience",
            groups if own or external else "not counted",
        ),
        ("held-out reward", measured),
        ("swarm", str(export_info["swarm"]) or "a crew's, or none"),
        *((key, str(value)) for key, value in sorted(terms.items())),
    ]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
    lines += [
        "# " + _cell(f"{base.rsplit('/', 1)[-1]}, post-trained by swarmnode {__version__}"),
        "",
    ]
    lines += [
        (
            "Trained by reinforcement learning with verifiable rewards by one node of a swarm,"
            " which judges every answer itself."
        ),
        "",
    ]
    lines += [
        "| | |",
        "|---|---|",
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows),
        "",
    ]
    if base == SMOLLM2 and export_info["kind"] == "adapter":
        lines += [LOADING_SMOLLM2, ""]
    lines += ["## Tasks", "", "| task | version | settings |", "|---|---|---|"]
    lines += [
        f"| {_cell(task.id)} | {_cell(task.version)} | {_cell(task.settings)} |" for task in tasks
    ]
    lines += [
        "",
        (
            "A version is a hash over what decides a question and its reward, the rows of a dataset"
            " included."
        ),
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Escape text for a table cell, so that it contains no markup, link or cell separator."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return re.sub(r"([\\`*_{}\[\]()#+!|~$@:&<>\"'-])", lambda match: f"&#{ord(match[0])};", plain)
