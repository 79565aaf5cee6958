"""`python -m swarmnode.tasks.fetch REQUEST`: parquet, a dataset of the Hub, or a taskset of
verifiers, as JSON lines. No code of a dataset is run; that of a taskset is, which the operator has
installed.

A process of its own: what reads parquet starts threads and takes hundreds of megabytes. REQUEST is
JSON: source, local, revision, subset, split, out (the file to write) and bytes (at most).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping

from swarmnode.install import install_command
from swarmnode.tasks import taskset


def main(request: str) -> int:
    asked = json.loads(request)
    rows: Iterable[Mapping[str, object]]
    try:
        rows = _read(asked)
    except ModuleNotFoundError as error:
        extra = "data" if error.name == "datasets" else "verifiers"
        print(f"it needs the package {error.name}: {install_command(extra)}", file=sys.stderr)
        return 1
    written = 0
    with open(asked["out"], "w", encoding="utf-8") as out:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False, default=str)
            written += len(line)
            if written > asked["bytes"]:
                print(
                    f"it has more than {asked['bytes'] >> 20} MiB: take a part of it",
                    file=sys.stderr,
                )
                return 1
            out.write(line + "\n")
    return 0


def _read(asked: Mapping[str, str | None]) -> Iterable[Mapping[str, object]]:
    source = str(asked["source"])
    if source.startswith(taskset.PREFIX):
        return list(taskset.rows(source))
    import datasets

    datasets.disable_progress_bars()
    if asked["local"]:
        return datasets.load_dataset("parquet", data_files=source, split="train", streaming=True)
    return datasets.load_dataset(
        source, asked["subset"], split=asked["split"], revision=asked["revision"]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
