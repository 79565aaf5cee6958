"""A deadline bounds the time in which nothing arrives, not the work."""

import pytest
import trio

from swarmnode.errors import PeerTimeout
from swarmnode.stages.head import Waiting


async def test_work_that_arrives_moves_the_deadline_and_silence_does_not(autojump_clock):
    waiting, arrived = Waiting(120.0), []

    async def work():
        for part in range(30):  # 600 tokens over four stages at 50 ms, say
            await trio.sleep(100.0)
            arrived.append(part)
            waiting.extend()
            waiting.wake()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        with waiting.deadline():
            await waiting.until(lambda: len(arrived) == 30)
        assert trio.current_time() == pytest.approx(3000.0)
    with pytest.raises(PeerTimeout), waiting.deadline():
        await waiting.until(lambda: len(arrived) == 31)
    assert trio.current_time() == pytest.approx(3120.0)
