"""`python -m swarmnode.tasks.fetch REQUEST`: parquet, or a dataset of the Hub, as JSON lines. No code of a dataset is run.

A process of its own: what reads parquet starts threads and takes hundreds of megabytes. REQUEST is JSON: source, local, revision, subset,
split, out (the file to write) and bytes (at most).
"""

from __future__ import annotations

import json
import sys


def main(request: str) -> int:
    asked = json.loads(request)
    try:
        import datasets
    except ModuleNotFoundError:
        print("it needs the package datasets: pip install 'swarmnode[data]'", file=sys.stderr)
        return 1
    datasets.disable_progress_bars()
    if asked["local"]:
        rows = datasets.load_dataset("parquet", data_files=asked["source"], split="train", streaming=True)
    else:
        rows = datasets.load_dataset(asked["source"], asked["subset"], split=asked["split"], revision=asked["revision"])
    written = 0
    with open(asked["out"], "w", encoding="utf-8") as out:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False, default=str)
            written += len(line)
            if written > asked["bytes"]:
                print(f"it has more than {asked['bytes'] >> 20} MiB: take a part of it", file=sys.stderr)
                return 1
            out.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
