"""`python -m swarmnode.tasks.fetch REQUEST`: convert parquet, a dataset of the Hub or a taskset of
verifiers to JSON lines. It runs no code of a dataset; it runs the code of a taskset, which the
operator has installed.

This is a separate process, because a parquet reader starts threads and takes hundreds of megabytes.
REQUEST is JSON:

    source, local, revision, subset, split   where the rows are
    columns                                  columns that are used; null for all
    out                                      file to write
    bytes                                    limit of its size

Dates and times become ISO 8601 texts, decimals become texts. An unused column has the value null.
"""

from __future__ import annotations

import datetime
import decimal
import json
import sys
import uuid
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
    written, used = 0, asked["columns"]
    with open(asked["out"], "w", encoding="utf-8", errors="surrogatepass") as out:
        for number, row in enumerate(rows, 1):
            plain = dict.fromkeys(row)
            for name, value in row.items():
                if used is not None and name not in used:
                    continue
                try:
                    plain[name] = _plain(value)
                except ValueError as error:
                    print(
                        f"row {number}: column {name!r} contains {error}, not text, numbers, lists"
                        " or objects: leave the column out",
                        file=sys.stderr,
                    )
                    return 1
            line = json.dumps(plain, ensure_ascii=False)
            written += len(line)
            if written > asked["bytes"]:
                print(
                    f"it has more than {asked['bytes'] >> 20} MiB: use a part of it",
                    file=sys.stderr,
                )
                return 1
            out.write(line + "\n")
    return 0


def _plain(value: object) -> object:
    """Return `value` as a JSON value. Raises ValueError with the name of a type that JSON lacks."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta | uuid.UUID):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    raise ValueError(type(value).__name__)


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
