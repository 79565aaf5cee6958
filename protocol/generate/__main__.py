"""Write protocol/registry.toml, schema/ and vectors/: `python -m protocol.generate [DIRECTORY]`.
The output is the same on every machine; `tests/conformance` compares it with the files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.generate.registry import registry
from protocol.generate.schema import schemas
from protocol.generate.vectors import documents


def files() -> dict[str, str]:
    """Return the content of every generated file by its path in protocol/."""
    return {
        "registry.toml": registry(),
        **{f"schema/{name}": content for name, content in schemas().items()},
        **{f"vectors/{name}": content for name, content in documents().items()},
    }


def main(arguments: Sequence[str]) -> None:
    directory = Path(arguments[0] if arguments else "protocol")
    for name, content in files().items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


if __name__ == "__main__":
    main(sys.argv[1:])
