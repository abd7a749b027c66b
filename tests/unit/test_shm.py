"""The backend "shm": what one rank writes into shared memory another sees, and who is gone is missed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardfx.runtime.distributed.shm import (
    LARGE,
    LinkError,
    LinkWord,
    ShmGroup,
    SocketLink,
    segment_of,
    shared_bytes,
)


class Gloo:
    """The backend for what groups do not do, which is nothing here."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = lambda: rank, lambda: 2


class Group(ShmGroup):
    """A group of two without a backend."""

    def _register_backend(self, *_: object) -> None:
        pass


@pytest.fixture
def links() -> Iterator[tuple[SocketLink, SocketLink]]:
    """Both ends: that of rank 0, and that of rank 1."""
    a, b = socket.socketpair(socket.AF_UNIX)
    made = SocketLink(a, 1, 0.3), SocketLink(b, 0, 0.3)
    yield made
    for each in made:
        each.close()


def test_another_rank_sees_memory_from_an_offset_on(links: tuple[SocketLink, SocketLink]) -> None:
    zero, one = links
    flat = shared_bytes(64)
    numbers = flat.view(torch.float32)[4:]
    where = segment_of(numbers)
    assert where is not None and where[1] == 16
    zero.tell(LinkWord.READY, 7, where)
    numbers.copy_(torch.arange(12.0))
    segment, byte = one.hear(LinkWord.READY, 7)
    seen = one.memory[segment][byte:]
    assert torch.equal(seen.view(torch.float32), torch.arange(12.0))
    seen[:4].view(torch.float32).fill_(5)
    assert numbers[0] == 5
    one.tell(LinkWord.TAKEN, 7)
    assert zero.has_heard(LinkWord.TAKEN, 7) and not zero.has_heard(LinkWord.TAKEN, 8)


def test_nobody_waits_to_say_something(links: tuple[SocketLink, SocketLink]) -> None:
    """Both say more than the system keeps for them before they listen."""

    def talk(link: SocketLink) -> None:
        for number in range(3000):
            link.tell(LinkWord.TAKEN, number)
        for number in reversed(range(3000)):
            link.hear(LinkWord.TAKEN, number)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(talk, links))


def test_a_rank_that_is_late_or_gone(links: tuple[SocketLink, SocketLink]) -> None:
    zero, one = links
    with pytest.raises(LinkError, match=r"Timed out waiting 0\.3 s for rank 1"):
        zero.hear(LinkWord.TAKEN, 0)
    one.tell(LinkWord.TAKEN, 0)
    one.close()
    zero.tell(LinkWord.TAKEN, 0)
    zero.hear(LinkWord.TAKEN, 0)  # said before it left
    with pytest.raises(LinkError, match="Connection closed by rank 1"):
        zero.hear(LinkWord.TAKEN, 1)


@pytest.fixture
def pair(links: tuple[SocketLink, SocketLink]) -> tuple[ShmGroup, ShmGroup]:
    return Group([links[0]], Gloo(0)), Group([links[1]], Gloo(1))


def test_slots_are_used_again_when_all_have_read_them(pair: tuple[ShmGroup, ShmGroup]) -> None:
    """Also where this rank starts more before it has read its own, and where others have not yet."""

    def work(group: ShmGroup) -> list[float]:
        given = [torch.full((n,), group.rank() + 1.0) for n in (3, LARGE // 4, 5, 2)]
        started = [group.allreduce([x]) for x in given]
        for each in reversed(started):
            each.wait()
        for number in range(40):
            other = torch.tensor([float(number)])
            group.allreduce([other]).wait()
            given.append(other)
        return [*(float(x.mean()) for x in given), len(group.memory)]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(work, pair):
            *sums, memory = found
            assert sums == [3.0] * 4 + [2.0 * number for number in range(40)]
            assert memory <= 12


def test_messages_are_found_by_tag_and_sent_before_anybody_waits(pair: tuple[ShmGroup, ShmGroup]) -> None:
    """In one thread: each sends all it has, and one tag twice, before it receives that in another order."""
    given = {3: torch.randn(5), 8: torch.randn(4, 6).t(), 1: torch.arange(7), 4: torch.empty(0)}
    for group, other in zip(pair, (1, 0), strict=True):
        for tag, x in given.items():
            assert group.send([x], other, tag).is_completed()
        group.send([torch.ones(2)], other, 3)
    for group, other in zip(pair, (1, 0), strict=True):
        for tag, x in [(tag, given[tag]) for tag in (1, 8, 4, 3)] + [(3, torch.ones(2))]:
            got = torch.empty(x.shape, dtype=x.dtype)
            group.recv([got], other, tag).wait()
            assert torch.equal(got, x)
    assert [len(group.memory) for group in pair] == [10, 10]
