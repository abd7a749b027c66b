"""The machine model: rates of a device (compute, memory) and of the links between ranks.

>>> machine = Machine.load("h100-dgx")              # a file of machines/, or the path of one like them
>>> machine.rate(torch.bfloat16), machine.connect(Mesh(dp=4, tp=8))["tp"].link.bandwidth
(989000000000000.0, 450000000000.0)
>>> Machine.measure().save("mine.json")             # ten to twenty seconds, on the machine at hand
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Link, Mesh

from . import calibrate, probes
from .curve import NARROW, PRODUCT, TOUCH, VIEW, Curve, of_dtype

FOLDER = Path(__file__).parent / "machines"
DEFAULT = "accelerator"
"""The default machine: round figures of no device in particular."""

POOLS = {"host": Link(25e9, 1e-5), "disk": Link(2e9, 1e-4)}
"""Default links to other pools: round figures, for PCIe 4.0 x16 (31.5 GB/s by specification) and an NVMe drive."""


@dataclass(frozen=True)
class Level:
    """The link between ranks whose numbers lie within one aligned block of ``ranks`` (None: any ranks)."""

    name: str
    link: Link
    ranks: int | None = None

    def reaches(self, span: int) -> bool:
        """Whether groups within aligned blocks of ``span`` ranks stay within this level."""
        return self.ranks is None or self.ranks % span == 0


@dataclass(frozen=True)
class Machine:
    """A device, its links and memory pools, by the rates that it reaches at best.

    Args:
        name: the name in reports.
        flops: FLOPs per second of matrix products, by dtype (``"bfloat16"``).
        bandwidth: bytes per second that an op reads and writes.
        memory: bytes of device memory of a rank.
        links: the links between ranks, the nearest first; the last one connects all.
        overhead: the fixed time of a call, in seconds.
        source: the origin of the figures.
        pools: the links between the device and other memory, one way: that of its ``host``, and its ``disk``.
        curves: measured times of calls by amount of work: by the name of an op (``"gelu"``), or ``"product"``,
            ``"narrow product"``, ``"touch"`` and ``"view"`` for all others; in one dtype if the name has one
            (``"product bfloat16"``), else in float32, and scaled for other dtypes by the ratio of their product rates.
            Times are in seconds.
        host_call, host_view: the time in which the host issues a call, and a view, while the device runs earlier ones;
            0 if device and host are one.
        hides: whether communication overlaps compute; not so for ranks that copy messages themselves.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    links: tuple[Level, ...]
    overhead: float = 0.0
    source: str = ""
    pools: Mapping[str, Link] = field(default_factory=lambda: dict(POOLS))
    curves: Mapping[str, Curve] = field(default_factory=dict)
    hides: bool = True
    host_call: float = 0.0
    host_view: float = 0.0

    def __post_init__(self) -> None:
        rates = {f"flops {dtype}": rate for dtype, rate in self.flops.items()}
        rates |= {"bandwidth": self.bandwidth, "memory": self.memory}
        some, names = f"flops={dict(self.flops)}, overhead={self.overhead}", [level.name for level in self.links]
        rated, linked = bool(self.flops) and self.overhead >= 0, bool(self.links) and self.links[-1].ranks is None
        checks: list[tuple[bool, str, str, object]] = [
            (rated, "needs a rate and an overhead that is not negative", "flops={...}", some),
            (linked, "the last link must connect all ranks", "links, the last one without ranks", names),
        ]
        for what, rate in rates.items():
            checks.append((0 < rate < math.inf, f"{what} must be positive", "a number above 0", rate))
        for dtype in self.flops:
            known = isinstance(getattr(torch, dtype, None), torch.dtype)
            checks.append((known, "unknown dtype", "a dtype, as bfloat16", dtype))
        for pool in self.pools:
            checks.append((pool in POOLS, "no other memory is called so", " or ".join(POOLS), pool))
        for right, what, expected, got in checks:
            if not right:
                raise Error(f"machine {self.name!r}: {what}", expected=expected, got=got)

    def rate(self, dtype: torch.dtype) -> float:
        """FLOPs per second in a dtype; of an unlisted one, as of the slowest."""
        return self.flops.get(str(dtype).removeprefix("torch."), min(self.flops.values()))

    def seconds(self, kind: str, flops: float, touched: float, dtype: torch.dtype) -> float:
        """The time of a call: measured for its kind (an op's name, or ``"view"``), or the longer of computing
        ``flops``, and of reading and writing ``touched`` bytes."""
        if kind == VIEW:
            return self._measured(VIEW, 0.0, dtype) or 0.0
        own = self._measured(kind, flops or touched, dtype, bool(flops))
        if own is not None:
            return own
        computing = self._measured(PRODUCT, flops, dtype, True) if flops else 0.0
        touching = self._measured(NARROW if flops else TOUCH, touched, dtype) or self._measured(TOUCH, touched, dtype)
        return max(
            flops / self.rate(dtype) + self.overhead if computing is None else computing,
            touched / self.bandwidth + self.overhead if touching is None else touching,
        )

    def _measured(self, kind: str, amount: float, dtype: torch.dtype, computes: bool = False) -> float | None:
        """The time by a measured curve; None without one."""
        own = self.curves.get(of_dtype(kind, dtype))
        if own is not None:
            return own.seconds(amount)
        curve = self.curves.get(kind)
        slower = self.rate(torch.float32) / self.rate(dtype) if computes else 1.0
        return curve.seconds(amount) * slower if curve is not None else None

    def pool(self, name: str) -> Link:
        """The link between the device and another memory."""
        return self.pools.get(name) or POOLS[name]

    def connect(self, mesh: Mesh, instead_of: Machine | None = None) -> Mesh:
        """The mesh with this machine's links on the axes that state none (or that have those of another machine).

        Ranks are numbered along the mesh, the last axis fastest, and fill one block of ranks after the other: an axis
        has the nearest link that reaches over all of its groups.
        """
        others = instead_of.connect(mesh.with_links({})) if instead_of is not None else None
        links, span = {}, 1
        for axis in reversed(mesh.axes):
            span *= 1 if axis.loop else axis.size
            unsaid = axis.link == Link() or (others is not None and axis.link == others[axis.name].link)
            near = next(level.link for level in self.links if level.reaches(span))
            links[axis.name] = near if unsaid else axis.link
        return mesh.with_links(links)

    # ---- from where -----------------------------------------------------------------------------------------

    @classmethod
    def of(cls, machine: Machine | str | None) -> Machine:
        """A machine as given in hints: itself, a name or path, or None for the default."""
        return machine if isinstance(machine, Machine) else cls.load(DEFAULT if machine is None else machine)

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """Load a known machine by its name, or one from a file."""
        known = sorted(path.stem for path in FOLDER.glob("*.json"))
        path = FOLDER / f"{name}.json" if name in known else Path(name)
        if not path.is_file():
            raise Error(
                f"no machine is called {str(name)!r}",
                expected=f"one of {', '.join(known)}, or the path of a JSON file like theirs",
                got=str(name),
                remedy="measure the one at hand: sx.Machine.measure()",
            )
        return cls.parse(path.read_text(encoding="utf-8"), where=str(path))

    @classmethod
    def parse(cls, text: str, where: str = "") -> Machine:
        """Parse the text of :meth:`json`."""
        try:
            fields = json.loads(text)
            links = [dict(level) for level in fields.pop("links")]
            pools = {name: Link(**x) for name, x in fields.pop("pools", {}).items()}
            curves = {kind: Curve(tuple(map(tuple, x))) for kind, x in fields.pop("curves", {}).items()}
            levels = tuple(Level(x.pop("name"), ranks=x.pop("ranks", None), link=Link(**x)) for x in links)
            return cls(**fields, links=levels, pools={**POOLS, **pools}, curves=curves)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise Error(
                "this is no description of a machine",
                where=where,
                expected="a JSON object as Machine.json() writes it",
                got=f"{type(error).__name__}: {error}",
            ) from None

    @classmethod
    def measure(cls, device: str | torch.device | None = None, name: str = "") -> Machine:
        """The machine at hand, measured in ten to twenty seconds: matrix products by dtype and size, memory bandwidth,
        small ops, the link to the host, and some ops by their size, as programs call them. On CUDA heavy ops are timed
        at the clock that the device sustains; products in float32 run as ``torch.set_float32_matmul_precision`` says.

        In a process group of several ranks all of them call this together: the link between them is measured too, and
        all get the first rank's figures. Else links are those of the nearest known machine, which ``source`` names.

        Args:
            device: what computes; by default CUDA where there is one, else the CPU.
            name: what to call it.
        """
        at = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        like = cls.load("cpu-laptop" if at.type == "cpu" else "h100-dgx")
        measured = calibrate.link(at)
        links = like.links if measured is None else (Level("measured", measured),)
        bandwidth = calibrate.memory_bandwidth(at)
        of_links = f"links as of {like.name}" if measured is None else f"one link, among {dist.get_world_size()} ranks"
        clock = calibrate.clock(at)
        products = probes.products(at, clock)
        curves = probes.curves(at, clock, products)
        overhead = curves[TOUCH].seconds(0.0)
        found = cls(
            name or f"measured {at.type}",
            {str(dtype).removeprefix("torch."): each.rate for dtype, each in products.items()},
            bandwidth,
            calibrate.memory_bytes(at),
            links,
            overhead,
            f"measured with torch {torch.__version__} on {calibrate.device_name(at)}; {of_links}",
            {**POOLS, "host": calibrate.host_link(at, bandwidth, overhead)},
            curves,
            at.type != "cpu",
            *calibrate.host_seconds(at),
        )
        return found if measured is None else calibrate.of_first(found)

    def json(self) -> str:
        """The machine as text: a file for :meth:`load`."""
        fields = asdict(self) | {"curves": {kind: curve.points for kind, curve in self.curves.items()}}
        fields["links"] = [
            {"name": x.name, **({"ranks": x.ranks} if x.ranks is not None else {}), **asdict(x.link)}
            for x in self.links
        ]
        return json.dumps(fields, indent=2)

    def save(self, path: str | Path) -> None:
        """Write :meth:`json` to a file."""
        Path(path).write_text(self.json() + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return self.json()
