"""A state on disk is read as it was written, whoever writes meanwhile."""

import itertools
import os
import threading
import time

import pytest
import torch

from swarmnode.errors import StateError
from swarmnode.stages import transfer


def test_a_file_that_is_replaced_while_it_is_read_is_one_or_the_other(tmp_path):
    """safetensors opens a path twice, and the second time it may be another file: of another length
    (RuntimeError), or of the next step."""
    path, done = tmp_path / "stage.safetensors", threading.Event()
    for step in (0, 1, 2):
        transfer.save(
            tmp_path / str(step),
            {"weights": torch.full((4,), float(step))},
            {"step": step, "more": "x" * 8 * (step // 2)},
        )

    def replace():
        for step in itertools.cycle((0, 1, 2)):
            os.link(tmp_path / str(step), tmp_path / "next")
            os.replace(tmp_path / "next", path)
            if done.is_set():
                return

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        until = time.monotonic() + 5.0
        read = 0
        while read < 1000 and time.monotonic() < until:
            if path.exists():
                tensors, about = transfer.load(path)
                assert tensors["weights"].tolist() == [about["step"]] * 4
                read += 1
    finally:
        done.set()
        writer.join()
    assert read > 0


@pytest.mark.parametrize("content", [b"", b"not a state", (8).to_bytes(8, "little") + b"{}      "])
def test_what_is_damaged_says_so_and_nothing_is_nothing(tmp_path, content):
    path = tmp_path / "stage.safetensors"
    assert transfer.read_about(path) is None
    path.write_bytes(content)
    with pytest.raises(StateError, match="is damaged"):
        transfer.load(path)
