"""Rank 0 hears of every rank that is gone, and why."""

import queue
import socket
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from verifier_service.metrics import VerifierMetrics
from verifier_service.parallel.links import READY, Followers, Leader, RankLost


class World:
    """Rank 0 with two others whose ends the test holds."""

    def __init__(self) -> None:
        pairs = {rank: socket.socketpair() for rank in (1, 2)}
        self.ends = {rank: there for rank, (_, there) in pairs.items()}
        self.followers = Followers({rank: here for rank, (here, _) in pairs.items()}, pids={})
        self.lost: queue.Queue[RankLost] = queue.Queue()
        self.followers.on_lost(self.lost.put)


@pytest.fixture
def world() -> World:
    return World()


def test_messages_arrive_as_they_were_sent_and_a_stop_as_the_end(world: World) -> None:
    leader = Leader(world.ends[1])
    messages = [np.arange(n, dtype=np.int32) for n in (1, 300_000)]
    received = []

    def follow() -> None:
        while (message := leader.receive()) is not None:
            received.append(message.tolist())

    threads = [threading.Thread(target=follow), threading.Thread(target=world.ends[2].makefile("rb").read)]
    for thread in threads:
        thread.start()
    for message in messages:
        world.followers.send(message)
    world.followers.stop(grace_seconds=0.0)
    threads[0].join(10)
    assert received == [message.tolist() for message in messages]
    world.ends[2].shutdown(socket.SHUT_RDWR)
    threads[1].join(10)
    assert world.lost.empty(), "who ends after a stop is not lost"


def test_waiting_ends_when_all_are_ready(world: World) -> None:
    waiting = threading.Thread(target=world.followers.wait_until_ready)
    waiting.start()
    world.ends[1].sendall(READY)
    waiting.join(0.1)
    assert waiting.is_alive()
    world.ends[2].sendall(READY)
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_rank_that_gives_up_is_lost_for_its_reason(world: World) -> None:
    world.ends[2].sendall(READY)
    world.ends[2].sendall(b"ValueError: no such expert")
    world.ends[2].close()
    lost = world.lost.get(timeout=10)
    assert (lost.rank, lost.reason) == (2, "ValueError: no such expert")
    with pytest.raises(RankLost, match="rank 2 is gone: ValueError"):
        world.followers.wait_until_ready()


def test_who_asks_later_hears_of_it_at_once_and_sending_fails(world: World) -> None:
    world.ends[1].close()
    assert world.lost.get(timeout=10).reason == "its connection closed"
    heard: list[RankLost] = []
    world.followers.on_lost(heard.append)
    assert [lost.rank for lost in heard] == [1]
    with pytest.raises(RankLost, match="rank 1"):
        world.followers.send(np.zeros(1, np.int32))


def test_a_lost_rank_is_counted_by_its_number(world: World) -> None:
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry)
    metrics.ranks.set(3)
    world.followers.on_lost(metrics.count_rank_failure)
    world.ends[2].close()
    world.lost.get(timeout=10)
    world.followers._watcher.join(10)
    assert registry.get_sample_value("tandem_rank_failures_total", {"rank": "2"}) == 1
    assert registry.get_sample_value("tandem_ranks") == 2
