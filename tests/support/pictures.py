"""`python -m tests.support.pictures` renders the images in docs/images from the example in
`snapshots`, with a real Chromium."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import trio
from PIL import Image

from tests.support.browser import status_page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTHS = {"status-desktop.png": 1280, "status-phone.png": 390}


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with status_page(Path(directory)) as tab:
            for name, width in WIDTHS.items():
                await tab.look(width)
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


if __name__ == "__main__":
    trio.run(main)
