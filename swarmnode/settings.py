"""Load the configuration from its sources.

Precedence: command line, SWARMNODE_* environment, named file, file in the data directory, user's
file, default. A wrong key or value gives one line with its source, the key and the nearest valid
key.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from swarmnode import model_defaults
from swarmnode.config import Config, PolicyConfig, TrainingConfig
from swarmnode.errors import ConfigError
from swarmnode.files import write_file
from swarmnode.gguf import is_gguf

ENV_PREFIX = "SWARMNODE_"
OTHER_VARIABLES = {
    "SWARMNODE_CONFIG",
    "SWARMNODE_PROGRESS_FD",
}
"""Environment names with the prefix that are not configuration keys."""


MODEL_DEPENDENT_KEYS = {f"training.{name}" for name in model_defaults.EMBEDDED_POLICY.values()}
"""Keys whose default depends on the model."""
MODEL_DEFAULT = "default for this model"
"""Origin of such a default."""

Settings = dict[str, tuple[object, str]]
"""Value and origin by dotted key."""


@dataclass(frozen=True)
class Resolved:
    """A configuration, and the origin of each key that is not a default."""

    config: Config
    origins: dict[str, str]

    def rows(self) -> Iterator[tuple[str, object, str]]:
        """Yield (dotted key, value, origin) for each key, in the order of config.py."""
        for key in valid_keys():
            default = MODEL_DEFAULT if key in MODEL_DEPENDENT_KEYS else "default"
            yield key, value(self.config, key), self.origins.get(key, default)


C = TypeVar("C", bound=BaseModel)


def is_set(config: BaseModel, key: str) -> bool:
    """Return True if a dotted key was set, even to its default."""
    outer, _, leaf = key.rpartition(".")
    section = value(config, outer) if outer else config
    return isinstance(section, BaseModel) and leaf in section.model_fields_set


def value(config: BaseModel, key: str) -> object:
    """Return the value of a dotted key."""
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def replaced(config: C, values: Mapping[str, object], where: str) -> C:
    """Return `config` with the values of some dotted keys replaced.

    Keys that were not set stay so, and keep following the model.

    Args:
        where: Source of the values, for errors.

    Raises:
        ConfigError: A value is invalid.
    """
    tree = config.model_dump(exclude_unset=True)
    for key, wanted in values.items():
        *path, leaf = key.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        section[leaf] = wanted
    try:
        return type(config).model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{where}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        ) from None


def default_file() -> Path:
    """Return the user's file: `config.toml` in the user's configuration directory."""
    try:
        directory = Path(platformdirs.user_config_dir("swarmnode"))
    except RuntimeError:  # no home directory, so no file in it either
        directory = Path(os.devnull)
    return (directory if directory.is_absolute() else Path(os.devnull)) / "config.toml"


def saved_file(data_dir: Path) -> Path:
    """Return the file of a data directory that `join`, `init` and `config set` write."""
    return data_dir / "config.toml"


def save(data_dir: Path, overrides: Sequence[str], recipe: str | None = None) -> Path:
    """Add a recipe and `key=value` texts to the file of a data directory, and return its path.

    The caller has validated them.

    Raises:
        Unavailable: The file cannot be written.
    """
    path = saved_file(data_dir)
    merged = _merge_entries(
        _from_file(path)
        | (_from_recipe(recipe) if recipe is not None else {})
        | _from_overrides(overrides)
    )
    values = {
        key: _with_absolute_paths(key, setting)
        for key, (setting, _) in merged.items()
        if key != "node.data_dir"
    }
    lines = [
        "# Settings of this node. `swarmnode config set KEY=VALUE` changes them and removes"
        " comments."
    ]
    for section in sorted({key.rpartition(".")[0] for key in values}):
        lines += ["", f"[{section}]"]
        lines += [
            f"{key.rpartition('.')[2]} = {toml(values[key])}"
            for key in sorted(values)
            if key.rpartition(".")[0] == section
        ]
    write_file(path, ("\n".join(lines) + "\n").encode())
    return path


def _with_absolute_paths(key: str, setting: object) -> object:
    """Return a setting with absolute paths of models and datasets, for any working directory."""
    if key == "policy.model" and isinstance(setting, str):
        path = Path(setting).expanduser()
        is_file = is_gguf(setting) and path.is_file()
        return str(path.absolute()) if path.is_dir() or is_file else setting
    if key == "task.datasets" and isinstance(setting, Mapping):
        return {
            name: {
                field: (
                    str(Path(text).absolute())
                    if field == "source" and isinstance(text, str) and Path(text).is_file()
                    else text
                )
                for field, text in dataset.items()
            }
            if isinstance(dataset, Mapping)
            else dataset
            for name, dataset in setting.items()
        }
    return setting


def toml(value: object) -> str:
    """Return a value in TOML."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{json.dumps(str(key), ensure_ascii=False)} = {toml(inner)}"
                for key, inner in value.items()
            )
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _data_dir(settings: Settings) -> Path:
    """Return the data directory of settings that are not validated yet."""
    named = settings.get("node.data_dir", (None, ""))[0]
    return Path(named) if isinstance(named, str) and named else Config().node.data_dir


def valid_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Return the dotted keys of all settings of `model`."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += valid_keys(inner, f"{prefix}{name}.")
        elif not _is_manifest_key(field):
            keys.append(prefix + name)
    return keys


def _is_manifest_key(field: FieldInfo) -> bool:
    """Return True if only a manifest sets this field."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("agreed"))


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    recipe: str | None = None,
) -> Resolved:
    """Merge all sources and validate.

    Args:
        file: a TOML file; None reads SWARMNODE_CONFIG or the default file, if there is one.
        environment: usually `os.environ`.
        overrides: `key=value` texts from the command line, dotted keys.
        recipe: name of a recipe; the other arguments have precedence over it.

    Raises:
        ConfigError: for an unreadable file, an unknown key or a value that does not fit.
    """
    environment = environment or {}
    named = file or (
        Path(environment["SWARMNODE_CONFIG"]) if environment.get("SWARMNODE_CONFIG") else None
    )
    defaults = _from_systemd(environment) | (_from_file(default_file()) if named is None else {})
    in_file = _from_file(named, must_exist=True) if named is not None else {}
    explicit = (
        (_from_recipe(recipe) if recipe is not None else {})
        | in_file
        | _from_environment(environment)
        | _from_overrides(overrides)
    )
    saved = _from_file(saved_file(_data_dir(defaults | explicit)))
    if "node.data_dir" in saved:
        raise ConfigError(
            f"{saved['node.data_dir'][1]}: node.data_dir cannot be set in the directory itself"
        )
    settings = _merge_entries(defaults | saved | explicit)
    nested = _nested({key: setting for key, (setting, _) in settings.items()})
    origins = {key: origin for key, (_, origin) in settings.items()}
    if "node.data_dir" not in origins and not Config().node.data_dir.is_absolute():
        raise ConfigError(
            "node.data_dir: this user has no home directory: name a directory with -d DIR"
        )
    try:
        return Resolved(Config.model_validate(nested), origins)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        key = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        leading = message.partition(":")[0]
        if leading in valid_keys():  # a rule over several settings begins with the one to change
            key, message = leading, message.partition(": ")[2]
        known = next(
            (k for k in origins if key == k or key.startswith(k + ".") or k.startswith(key + ".")),
            key,
        )
        hint = ""
        if first["type"] == "list_type" and isinstance(first["input"], str):
            hint = f"""; write '{known}=["{first["input"].strip("[]")}"]'"""
        origin = origins.get(known, "configuration")
        if known == "task.settings" and len(first["loc"]) == 5:  # an error per form of the union
            known += f'."{first["loc"][2]}".{first["loc"][3]}'
            message = "Input should be true, false, a number or a text"
        raise ConfigError(f"{origin}: {known}: {message}{hint}") from None


def _from_systemd(environment: Mapping[str, str]) -> Settings:
    """Return the directory of a unit's StateDirectory=, which replaces the user's."""
    directory = environment.get("STATE_DIRECTORY", "").split(":")[0]
    return {"node.data_dir": (directory, "systemd STATE_DIRECTORY")} if directory else {}


def _from_file(path: Path, *, must_exist: bool = False) -> Settings:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not must_exist:
            return {}
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text, so not TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    remedy = "; correct or remove this line"
    return {_check_key(key, str(path), remedy): (value, str(path)) for key, value in _leaves(table)}


@dataclass(frozen=True)
class Recipe:
    """Settings of the package for one kind of machine and size of model."""

    name: str
    what: str
    """First line of its file: machine and model."""
    needs: str = ""
    """Extra to install in addition to `train`; may be empty."""


def recipes() -> list[Recipe]:
    """Return all recipes, sorted by name."""
    files = [
        file
        for file in (resources.files("swarmnode") / "recipes").iterdir()
        if file.name.endswith(".toml")
    ]
    found = []
    for file in files:
        what, figures = file.read_text(encoding="utf-8").splitlines()[:2]
        found.append(
            Recipe(
                file.name.removesuffix(".toml"),
                what.lstrip("# "),
                figures.partition("Needs the extra: ")[2],
            )
        )
    return sorted(found, key=lambda recipe: recipe.name)


def recipe_text(name: str) -> str:
    """Return the text of a recipe. Raises ConfigError for an unknown name."""
    known = [recipe.name for recipe in recipes()]
    if name not in known:
        raise ConfigError(f"command line: no recipe {name!r}; there are {', '.join(known)}")
    return (resources.files("swarmnode") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def recipe_values(name: str) -> dict[str, object]:
    """Return the values of a recipe by dotted key. Raises ConfigError for an unknown name."""
    return {
        _check_key(key, name): value for key, value in _leaves(tomllib.loads(recipe_text(name)))
    }


def _from_recipe(name: str) -> Settings:
    return {key: (value, f"recipe {name}") for key, value in recipe_values(name).items()}


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CUDA_TORCH = "pip uninstall -y torch, then pip install torch: PyPI's is for CUDA"


def unused_gpu(policy: PolicyConfig, driver: Path = NVIDIA_DRIVER) -> list[str]:
    """Return a warning, with the remedy, if torch cannot use this machine's NVIDIA GPU.

    Does not import torch.
    """
    torch = metadata.version("torch")
    if policy.device != "auto" or not driver.exists() or not torch.endswith("+cpu"):
        return []
    return [f"this machine has an NVIDIA GPU, but torch {torch} is built for the CPU: {CUDA_TORCH}"]


def unsuitable_values(config: Config) -> list[str]:
    """Return a warning, with the remedy, for each value that does not suit the model."""
    policy, training, kind = config.policy, config.training, config.model_defaults
    found = []
    if training.learning_rate >= kind.spoiling_rate:
        found.append(
            f"training.learning_rate = {training.learning_rate:g} with {kind.trained} of"
            f" {policy.model} probably spoils it: set about {kind.learning_rate:g}"
        )
    if training.max_completion_length < kind.shortest_answer:
        found.append(
            f"training.max_completion_length = {training.max_completion_length} is the length of"
            f" the embedded policy, not of {policy.model}: set {kind.max_completion_length}, or the"
            " longest answer of your tasks"
        )
    return found


def _from_environment(environment: Mapping[str, str]) -> Settings:
    by_name = {ENV_PREFIX + key.replace(".", "_").upper(): key for key in valid_keys()}
    found: Settings = {}
    for name, text in environment.items():
        if not name.startswith(ENV_PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in by_name:
            raise ConfigError(f"environment: unknown key {name}{_nearest(name, by_name)}")
        found[by_name[name]] = (_parse(text, by_name[name]), f"environment {name}")
    return found


def _from_overrides(overrides: Sequence[str]) -> Settings:
    found: Settings = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"command line: {text!r} is not key=value")
        table, entry = _table_entry(key.strip())
        if entry:
            found[f"{table}.{entry}"] = (_parse(value, table), "command line")
            continue
        name = _check_key(key.strip().replace("-", "_"), "command line")
        found[name] = (_parse(value, name), "command line")
    return found


def _table_entry(key: str) -> tuple[str, str]:
    """Split `task.settings."games:guess".turns` into the setting, which is a table, and the key in
    it. Returns empty texts for another key."""
    for table in valid_keys():
        section, _, entry = key.partition(table + ".")
        if entry and not section and isinstance(value(Config(), table), dict):
            return table, entry
    return "", ""


def _merge_entries(settings: Settings) -> Settings:
    """Put the entries of tables (`_table_entry`) into their tables; an entry replaces one of the
    same name. Raises ConfigError."""
    found = {key: each for key, each in settings.items() if not _table_entry(key)[0]}
    for key, (setting, origin) in settings.items():
        table, entry = _table_entry(key)
        if not table:
            continue
        try:
            path = tomllib.loads(f"{entry} = 0")
        except tomllib.TOMLDecodeError:
            name, _, leaf = entry.rpartition(".")
            quoted = f'{table}."{name}".{leaf}' if name else f'{table}."{entry}"'
            raise ConfigError(
                f"{origin}: {key}: quote a name that is not letters, digits, '-' and '_': {quoted}"
            ) from None
        whole, _ = found.get(table, ({}, origin))
        if not isinstance(whole, dict):
            raise ConfigError(f"{found[table][1]}: {table}: {whole!r} is not a table")
        found[table] = (_set_entry(whole, path, setting), origin)
    return found


def _set_entry(
    table: Mapping[str, Any], path: Mapping[str, Any], setting: object
) -> dict[str, Any]:
    """Return `table` with `setting` at the only leaf of `path`."""
    ((name, rest),) = path.items()
    if not isinstance(rest, dict):
        return {**table, name: setting}
    inner = table.get(name, {})
    return {**table, name: _set_entry(inner if isinstance(inner, dict) else {}, rest, setting)}


def _leaves(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    sections = {key.rpartition(".")[0] for key in valid_keys()}
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and (
            key in sections or any(s.startswith(key + ".") for s in sections)
        ):
            yield from _leaves(value, key + ".")
        else:
            yield key, value


def _check_key(key: str, origin: str, remedy: str = "") -> str:
    keys = valid_keys()
    if key in keys:
        return key
    raise ConfigError(f"{origin}: unknown key {key}{_nearest(key, keys)}{remedy}")


def _nearest(name: str, names: Sequence[str] | Mapping[str, str]) -> str:
    """Return a hint at the name that was probably meant, or an empty text if none is close."""
    leaf = lambda text: text.rpartition(".")[2]
    close = [
        near
        for near in difflib.get_close_matches(name, list(names), n=3, cutoff=0.8)
        if difflib.SequenceMatcher(None, leaf(name), leaf(near)).ratio() >= 0.6
    ]
    return f" (nearest: {close[0]})" if close else ""


def _nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Return nested tables from dotted keys."""
    tree: dict[str, object] = {}
    for head in dict.fromkeys(key.partition(".")[0] for key in settings):
        inner = {
            key.partition(".")[2]: setting
            for key, setting in settings.items()
            if key.partition(".")[0] == head
        }
        tree[head] = inner[""] if "" in inner else _nested(inner)
    return tree


def _parse(text: str, key: str) -> object:
    """Return a value as TOML reads it, or the text itself if it is not TOML, such as `/ip4/…`.

    The value of a text setting stays a text: a name such as `2026`, a revision such as `1e5`.
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if _is_text(key) and not isinstance(value, str | list | dict) else value


def _is_text(key: str) -> bool:
    """Return True if a setting is a text, or none."""
    section: object = Config
    *path, leaf = key.split(".")
    for name in path:
        section = section.model_fields[name].annotation  # type: ignore[attr-defined]
    return section.model_fields[leaf].annotation in (str, str | None)  # type: ignore[attr-defined]


def reference() -> str:
    """Return docs/configuration.md: each key with its default and description."""
    lines = [
        "# Configuration",
        "",
        "A setting can come from several sources. The first of these that has it wins:",
        "",
        "1. `--set key=value` on the command line",
        "2. the environment, as `SWARMNODE_SECTION_KEY`",
        "3. a TOML file that is named with `--config` or `SWARMNODE_CONFIG`",
        (
            "4. `config.toml` in the data directory, which `join`, `init` and `config set` write,"
            " or else the user's `config.toml`"
        ),
        "5. the default",
        "",
        (
            "`swarmnode config show` prints the settings with their sources. An unknown key or an"
            " invalid value ends the command with one line and exit code 78. Times are in seconds."
        ),
        "",
        (
            "Set one entry of a table by its name:"
            """ `--set 'task.settings."games:guess".turns=6'`. A name needs quotes unless"""
        ),
        "it consists of letters, digits, `-` and `_`. The other entries do not change.",
        "",
        "`python -m swarmnode.settings` writes this page; a test compares it with the code.",
    ]
    for section, field in Config.model_fields.items():
        lines += ["", f"## `[{section}]`", "", "| key | default | meaning |", "|---|---|---|"]
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines += _reference_rows(field.annotation, "")
    return "\n".join(lines) + "\n"


def _for_other_models(name: str) -> str:
    """Return the defaults of a training key for models other than the embedded policy."""
    if name != "learning_rate":
        return f"another model: {model_defaults.ANSWER_TOKENS}"
    low, high = model_defaults.SMALLEST_RATE, model_defaults.LARGEST_RATE
    return (
        f"another model, by its size: {high:g} to {low:g}; an adapter with alpha"
        f" {model_defaults.ADAPTER_ALPHA}: {model_defaults.ADAPTER_FACTOR:g} times that"
    )


def _reference_rows(model: type[BaseModel], prefix: str) -> list[str]:
    rows: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            rows += _reference_rows(inner, f"{prefix}{name}.")
            continue
        if _is_manifest_key(field):
            continue
        if field.default_factory is not None and "Path" in str(inner):
            default = "the user's state directory"
        else:
            default = f"`{field.get_default(call_default_factory=True)!r}`"
        if model is TrainingConfig and f"training.{name}" in MODEL_DEPENDENT_KEYS:
            default += f"; {_for_other_models(name)}"
        rows.append(
            f"| `{prefix}{name}` | {default} | {' '.join(str(field.description).split())} |"
        )
    return rows


if __name__ == "__main__":
    print(reference(), end="")
