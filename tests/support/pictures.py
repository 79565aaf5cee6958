"""`python -m tests.support.pictures` renders the images in docs/images from the example in
`snapshots`, with a real Chromium."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import trio
from PIL import Image

from swarmnode.config import HttpConfig
from swarmnode.observe import http
from swarmnode.observe.history import History
from tests.support.browser import chromium
from tests.support.snapshots import example, example_at

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTHS = {"status-desktop.png": 1280, "status-phone.png": 390}


class Past(History):
    """Five minutes of history of the example node."""

    def __init__(self) -> None:
        super().__init__()
        for second in range(300, 600):
            self.add(example_at(float(second)))


async def main() -> None:
    http.History = Past  # type: ignore[misc]
    async with trio.open_nursery() as nursery:
        url = await nursery.start(
            lambda task_status: http.serve_http(
                HttpConfig(port=0), example, task_status=task_status
            )
        )
        with tempfile.TemporaryDirectory() as directory:
            async with chromium(Path(directory)) as tab:
                for name, width in WIDTHS.items():
                    await tab.look(width)
                    await tab.open(url)
                    await tab.until(
                        "document.getElementById('state').textContent === 'ready' &&"
                        " document.querySelector('path.line')"
                    )
                    picture = (
                        Image.open(io.BytesIO(await tab.picture()))
                        .convert("RGB")
                        .quantize(64, dither=Image.Dither.NONE)
                    )
                    picture.save(IMAGES / name, optimize=True)
                    print(f"{IMAGES / name}: {picture.width} x {picture.height}")
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
