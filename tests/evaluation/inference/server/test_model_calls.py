"""How what the engine's thread makes reaches the streams of the event loop."""

import asyncio
import json
from threading import Thread
from typing import Any

from gristmill.evaluation.inference.server.model_calls import Outbox, StreamEvents, server_event


async def _after_two_steps() -> list[list[tuple[int, Any]]]:
    """What two streams and a third take: a step has events of the first two, the next one of the first alone."""
    loop, outbox = asyncio.get_running_loop(), Outbox()
    streams = [StreamEvents() for _ in range(3)]

    def steps() -> None:
        outbox.put(loop, (streams[0].put, 0, "a"))
        outbox.put(loop, (streams[1].put, 7, "b"))
        outbox.put(loop, (streams[0].put, 1, "c"))
        outbox.send()
        outbox.put(loop, (streams[0].put, 0, "d"))
        outbox.send()
        outbox.put(loop, (streams[2].put, 0, "not sent"))

    thread = Thread(target=steps)
    thread.start()
    thread.join()
    taken = [await asyncio.wait_for(stream.take(), 10) for stream in streams[:2]]
    return [*taken, streams[2].pending]


def test_a_stream_takes_all_that_came_in_order() -> None:
    assert asyncio.run(_after_two_steps()) == [[(0, "a"), (1, "c"), (0, "d")], [(7, "b")], []]


def test_a_closed_loop_is_no_error() -> None:
    loop, outbox = asyncio.new_event_loop(), Outbox()
    loop.close()
    outbox.put(loop, (StreamEvents().put, 0, "a"))
    outbox.send()


def test_events_are_json_in_utf_8() -> None:
    event = server_event({"text": "ü\n", "logprob": -0.5}, "response.output_text.delta")
    name, data, *rest = event.decode().split("\n")
    assert (name, rest) == ("event: response.output_text.delta", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {"text": "ü\n", "logprob": -0.5}
