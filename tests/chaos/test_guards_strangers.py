"""Several attackers at once try every attack in turn against one guarded host, while honest peers
use it."""

import contextlib
import random

import pytest
import trio

from tests.support.host_process import guarded, processes
from tests.support.strangers import MB, flood, garbage, raising_handlers, stranger, streams

STEPS_IN = {
    "window_overrun": flood,
    "streams_overrun": streams,
    "handler_failed": raising_handlers,
    "slot_released": garbage,
}
"""Guards that must have fired, and the purpose of each."""


@pytest.mark.slow
async def test_serves_honest_peers_during_all_attacks():
    with processes(guarded()) as (host,):
        before, visits, busy = host.rss(), [], True

        async def honest():
            while busy:
                visits.append(await host.serves())

        async with trio.open_nursery() as outer:
            outer.start_soon(honest)
            async with trio.open_nursery() as strangers:
                for seed in range(3):
                    strangers.start_soon(stranger, host.address, seed)
            busy = False
        assert len(visits) >= 3
        assert all(visits)
        assert host.rss() - before < 150 * MB
        await host.settles("slots", 0)
        assert await host.serves()
        for guard, attack in STEPS_IN.items():
            for seed in range(5):  # on a busy machine an attack may be cut short
                if (fired := (await host.ask("stat"))["fired"][guard]) > 0:
                    break
                with trio.move_on_after(20), contextlib.suppress(Exception):
                    await attack(host.address, random.Random(seed))
                assert await host.serves()
            assert fired > 0, guard
