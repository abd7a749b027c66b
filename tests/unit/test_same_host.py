"""Links between neighbours: what one lays into shared memory another sees, and who is gone is missed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardfx.runtime.same_host.links import Link, NeighbourError, Word
from shardfx.runtime.same_host.neighbourhood import EACH, Neighbours
from shardfx.runtime.same_host.parcels import Parcels
from shardfx.runtime.same_host.shared_memory import segment_of, shared_bytes


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    """Both ends: that of rank 0, where rank 1 is the neighbour, and the other way round."""
    a, b = socket.socketpair(socket.AF_UNIX)
    made = Link(a, 1, 0.3), Link(b, 0, 0.3)
    yield made
    for each in made:
        each.close()


def test_a_neighbour_sees_memory_from_its_place_on(links: tuple[Link, Link]) -> None:
    zero, one = links
    flat = shared_bytes(64)
    numbers = flat.view(torch.float32)[4:]
    where = segment_of(numbers)
    assert where is not None and where[1] == 16
    zero.tell(Word.READY, 7, where)
    numbers.copy_(torch.arange(12.0))
    seen = one.hear(Word.READY, 7)
    assert torch.equal(seen.view(torch.float32), torch.arange(12.0))
    seen[:4].view(torch.float32).fill_(5)
    assert numbers[0] == 5
    one.tell(Word.DONE, 7)
    assert zero.has_heard(Word.DONE, 7) and not zero.has_heard(Word.DONE, 8)


def test_what_lies_elsewhere_is_not_shared_and_what_is_gone_is_let_go(links: tuple[Link, Link]) -> None:
    zero, one = links
    assert segment_of(torch.empty(4)) is None
    flat = shared_bytes(8)
    zero.tell(Word.READY, 0, segment_of(flat))
    one.hear(Word.READY, 0)
    assert len(one.memory) == 1
    kept = flat.view(torch.float64)
    del flat
    assert segment_of(kept) is not None
    del kept
    zero.tell(Word.DONE, 1)
    one.hear(Word.DONE, 1)
    assert not one.memory


def test_nobody_waits_to_say_something(links: tuple[Link, Link]) -> None:
    """Both say more than the system keeps for them before they listen."""

    def talk(link: Link) -> None:
        for number in range(3000):
            link.tell(Word.DONE, number)
        for number in reversed(range(3000)):
            link.hear(Word.DONE, number)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(talk, links))


def test_a_neighbour_that_is_late_or_gone(links: tuple[Link, Link]) -> None:
    zero, one = links
    with pytest.raises(NeighbourError, match=r"Timed out waiting 0\.3 s for rank 1"):
        zero.hear(Word.DONE, 0)
    one.tell(Word.DONE, 0)
    one.close()
    zero.tell(Word.DONE, 0)
    zero.hear(Word.DONE, 0)  # said before it left
    with pytest.raises(NeighbourError, match="Connection closed by rank 1"):
        zero.hear(Word.DONE, 1)


def test_places_are_lent_again_when_all_have_seen_them(links: tuple[Link, Link]) -> None:
    """Also where this rank starts more before it has looked itself, and where others have not looked yet."""

    def work(near: Neighbours) -> list[float]:
        given = [torch.full((n,), near.place + 1.0) for n in (3, EACH // 4, 5, 2)]
        started = [near.all_reduce_(x, "sum") for x in given]
        sums = [float(each.wait().mean()) for each in reversed(started)]
        for x in range(40):
            sums.append(float(near.all_reduce_(torch.tensor([float(x)]), "max").wait()))
        return [*sums, len(near.memory)]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(work, [Neighbours([links[0]], 0), Neighbours([links[1]], 1)]):
            *sums, memory = found
            assert sums == [3.0] * 4 + [float(x) for x in range(40)]
            assert memory <= 12


def test_parcels_are_found_by_number_and_sent_before_anybody_waits(links: tuple[Link, Link]) -> None:
    """In one thread: each sends all it has, and one number twice, before it receives that in another order."""
    posts = Parcels([None, links[0]]), Parcels([links[1], None])
    given = {3: torch.randn(5), 8: torch.randn(4, 6).t(), 1: torch.arange(7), 4: torch.empty(0)}
    for post, other in zip(posts, (1, 0), strict=True):
        for number, x in given.items():
            post.send(x, other, number)
        post.send(torch.ones(2), other, 3)
    for post, other in zip(posts, (1, 0), strict=True):
        for number in (1, 8, 4, 3):
            x = given[number]
            assert torch.equal(post.receive(torch.empty(x.shape, dtype=x.dtype), other, number).wait(), x)
        assert torch.equal(post.receive(torch.empty(2), other, 3).wait(), torch.ones(2))
    assert [len(post.memory) for post in posts] == [5, 5]


def test_what_was_sent_stays_until_it_was_taken(links: tuple[Link, Link]) -> None:
    """A place is used again only then, and grows."""
    zero, one = Parcels([None, links[0]]), Parcels([links[1], None])
    for step in range(20):
        for turn in range(3):
            zero.send(torch.full((step + 1,), 10.0 * step + turn), 1, turn)
        for turn in (2, 0, 1):
            seen = one.receive(torch.empty(step + 1), 0, turn).wait()
            assert torch.equal(seen, torch.full((step + 1,), 10.0 * step + turn))
    assert len(zero.memory) == 3
    zero.send(torch.ones(4), 1, 0)
    links[0].close()
    assert torch.equal(one.receive(torch.empty(4), 0, 0).wait(), torch.ones(4))  # sent before it left
    with pytest.raises(NeighbourError, match="Connection closed by rank 0"):
        one.receive(torch.empty(4), 0, 1).wait()
