"""What is raised where ranks differ: each side once, in words, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from shardfx.ir.errors import Error
from shardfx.runtime.peers import AROUND, Content, OtherSurroundings, Subjects

from .subjects import compared

SHOWN = 4
WRITTEN = "parameters were written into since the last call"
DONE = "done since the last call"
SAMPLE = "content of what is passed"
HISTORY = (DONE, WRITTEN)


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def difference(every: Sequence[tuple[str, Mapping[str, str]]]) -> Error:
    """What ranks say that do not do the same, each side once."""
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(every) if text]
    if failures:
        lines = [line for text in failures[:SHOWN] for line in text.splitlines()]
        return Error(
            "a call failed on another rank",
            where=f"rank {dist.get_rank()}; the start of a call",
            expected="every rank to come to this call",
            got=f"\n  {'':<10}".join(lines),
            remedy="mend it there; nothing was run, and all ranks can go on",
        )
    said = [words for _, words in every]
    subjects = dict.fromkeys(subject for words in said for subject in words)
    differ = [subject for subject in subjects if len({words.get(subject) for words in said}) > 1]
    of_all = [subject for subject in differ if all(subject in words for words in said)]
    shown = sides(said, [*of_all, *(subject for subject in differ if subject not in of_all)])
    if set(differ) <= {*HISTORY}:
        return Error(
            "the ranks' parameters are no longer the same",
            where=f"rank {dist.get_rank()}; before pm(...)",
            expected="the same done to parameters by all ranks: backwards, optimizers' steps at the same rates, writes",
            got=shown,
            remedy="let all ranks do the same between calls; pm.load_full_state_dict(...), or a checkpoint that all "
            "load, makes them the same again, and until then this is raised",
        )
    kind = OtherSurroundings if differ == [AROUND] else Error
    return kind(
        "the ranks do not make the same call",
        where=f"rank {dist.get_rank()}; pm(...)",
        expected="the same call on all ranks: training or evaluation, mode, shapes, numbers",
        got=shown,
        remedy="call a parallel module on all ranks alike, also to evaluate, to save, and for an epoch's last batch; "
        "ranks that pass their own parts pad them to one length; nothing was run, and all ranks can go on",
    )


def sides(said: Sequence[Mapping[str, str]], differ: Sequence[str]) -> str:
    """What ranks say of the subjects in which they differ, each side once."""
    found: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        parts = [f"{subject}: {words.get(subject, 'no')}" for subject in differ[:SHOWN]]
        parts += [f"and {len(differ) - SHOWN} more that differ"] if len(differ) > SHOWN else []
        found.setdefault("; ".join(parts), []).append(rank)
    lines = [f"{named(ranks)}: {text}" for text, ranks in found.items()]
    shown = [*lines[:SHOWN], f"and {len(lines) - SHOWN} sides more"] if len(lines) > SHOWN else lines
    return f"\n  {'':<10}".join(shown)


def other_plans(every: Sequence[Subjects]) -> Error:
    """The first line in which plans differ, as each rank has it."""
    subject = next(name for name in every[0] if any(each[name] != every[0][name] for each in every))
    lists = [[compared(line) for line in each[subject]] for each in every]
    shortest = min(map(len, lists))
    i = next((i for i in range(shortest) if len({lines[i] for lines in lists}) > 1), shortest)
    said = [{subject: " ".join(each[subject][i].split()) if i < len(each[subject]) else "no more"} for each in every]
    return Error(
        "the ranks have made different plans",
        where=f"rank {dist.get_rank()}; parallelize(...), or a call in a form that is new",
        expected="the same model, loss, mesh, hints and shapes of example inputs on all ranks",
        got=sides(said, [subject]),
        remedy="let nothing in the model, its loss or the hints depend on the rank; examples are of the global batch; "
        "and make a model on meta there, with torch.device('meta'), for one that is moved loses its ties",
    )


def no_longer_alike(name: str, alike: Sequence[Sequence[int]]) -> Error:
    """What ranks hold as the same, and is not."""
    return Error(
        "the ranks' parameters are no longer the same",
        where=f"rank {dist.get_rank()}; {name!r}",
        expected="the same content on all ranks that hold this",
        got="contents differ between " + " and ".join(named(ranks) for ranks in alike[:SHOWN]),
        remedy="load the same, step optimizers at the same rates, scale and clip gradients, and zero them, on all "
        "ranks alike; pm.load_full_state_dict(...), or a checkpoint that all load, makes them the same again, and "
        "until then this is raised",
    )


def different(given: Content, alike: Sequence[Sequence[int]]) -> Error:
    """An input that should be the same on several ranks, and is not."""
    here, whole, part = given.name, given.whole, given.part
    if here.startswith("optimizer."):
        return Error(
            "the ranks step at different rates",
            where=f"pm.step(...), {here!r}",
            expected="the same rate on all ranks",
            got="numbers differ between " + " and ".join(named(ranks) for ranks in alike[:SHOWN]),
            remedy="let schedules step on all ranks alike, by what all of them know: a loss of pm(...) is that of the "
            "whole batch",
        )
    if given.piece >= 0:
        remedy = "ranks that hold the same part of the batch pass the same: let samplers depend on the data axes alone"
    elif part == whole:
        remedy = "no axis cuts this input: its ranks work on one batch, so let all pass the same"
    else:
        larger = tuple(w * (w // p) if p and w != p else w for w, p in zip(whole, part, strict=True))
        remedy = (
            f"either pass the same batch on all ranks; or let each rank pass its own part of it, {part}; where each "
            f"has a batch of {whole} of its own, as with DDP, parallelize with example inputs of all ranks' rows "
            f"together, about {larger}, and each passes its own"
        )
    return Error(
        "ranks pass different batches as the same one",
        where=f"pm(...), {here!r}",
        expected=f"the whole batch {whole}, the same on all ranks" if given.piece < 0 else f"the same part {part}",
        got="contents differ between " + " and ".join(named(ranks) for ranks in alike[:SHOWN]),
        remedy=remedy,
    )
