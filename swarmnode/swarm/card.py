"""The model card of an export: what was trained, on what, with whom, and how well it does; and the
export's way to the Hub."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode import __version__
from swarmnode.errors import ConfigError, Refused, Unavailable

HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
FILE = "README.md"


@dataclass(frozen=True)
class TrainedOn:
    """One task."""

    id: str
    version: str
    settings: str
    """JSON, as a manifest has it; of a dataset with the hash of its rows and where they are
    from."""
    hub: str = ""
    """Name of the dataset on the Hub, if it is from there."""


def card(
    told: Mapping[str, object], tasks: Sequence[TrainedOn], terms: Mapping[str, object]
) -> str:
    """README.md of an export. told: what its swarmnode.json says; terms: settings that decided how
    it was trained, by their keys."""
    base = str(told["base"])
    kind = "an adapter (LoRA)" if told["kind"] == "adapter" else "all weights"
    head: dict[str, object] = {
        "library_name": "peft" if told["kind"] == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["swarmnode", "reinforcement-learning", "grpo"],
    }
    if HUB_NAME.fullmatch(base):
        head |= {"base_model": base}
    datasets = sorted({task.hub for task in tasks if task.hub})
    if datasets:
        head |= {"datasets": datasets}
    reward = told["reward_held_out"]
    measured = (
        f"{reward:.4f}, mean over the tasks below, at the training temperature"
        if isinstance(reward, float)
        else "not measured"
    )
    groups = f"{told['own_groups']} groups of its own and {told['external_groups']} of peers'"
    rows = [
        ("base model", f"{base}, fingerprint {str(told['base_fingerprint'])[:16]}…"),
        ("trained", f"{kind}, {told['step']} steps, policy version {told['policy_version']}"),
        ("experience", groups if told["own_groups"] or told["external_groups"] else "not counted"),
        ("held-out reward", measured),
        ("swarm", str(told["swarm"]) or "a crew's, or none"),
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
    """Text as it is, in a line of Markdown: no markup, link or cell of its own."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return re.sub(
        r"([\\`*_{}\[\]()#+!|~$@:-])", lambda match: f"&#{ord(match[0])};", html.escape(plain)
    )


def check_target(repo: str) -> None:
    """Raises ConfigError for a name that is none of the Hub's, Unavailable without its package,
    Refused without a token."""
    if not HUB_NAME.fullmatch(repo):
        raise ConfigError(f"--push {repo[:100]!r} is not <user or organisation>/<name> on the Hub")
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise Unavailable("--push needs huggingface_hub: pip install huggingface_hub") from None
    if get_token() is None:
        raise Refused(
            "--push needs a token of the Hub that may write: `hf auth login`, or set HF_TOKEN;"
            " nothing was written or sent"
        )


def push(directory: Path, repo: str, *, public: bool, message: str) -> str:
    """Upload an export as one commit; its URL. A repository that is not there is made, private
    unless `public`.

    Raises Unavailable, with what the Hub said, or that it cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(library_name="swarmnode", library_version=__version__)
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo, folder_path=directory, commit_message=message
            ).commit_url
        )
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        why = {401: "the token is not valid", 403: "the token may not write there"}.get(
            status or 0, str(error).split("\n")[0][:300]
        )
    except Exception as error:  # of whichever HTTP library this release of huggingface_hub uses  # noqa: BLE001
        why = (str(error).strip().split("\n") or [""])[0][:300] or type(error).__name__
    raise Unavailable(
        f"{directory} is written, and could not be pushed to {repo}: {why}; try again with `hf"
        f" upload {repo} {directory}`"
    )
