"""What a rank runs on: how fast it computes, reads and writes, and what connects it to the others.

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
"""Round figures of no device in particular: what counts where nobody names one."""

POOLS = {"host": Link(25e9, 1e-5), "disk": Link(2e9, 1e-4)}
"""Of machines that do not say: round figures, for PCIe 4.0 x16 (31.5 GB/s by its specification) and a drive of NVMe."""


@dataclass(frozen=True)
class Level:
    """What connects ranks whose numbers lie within one block of ``ranks`` (None: any ranks)."""

    name: str
    link: Link
    ranks: int | None = None

    def reaches(self, span: int) -> bool:
        """Whether groups that lie within aligned blocks of ``span`` ranks stay within it."""
        return self.ranks is None or self.ranks % span == 0


@dataclass(frozen=True)
class Machine:
    """A device and its surroundings, by rates that it reaches at best.

    Args:
        name: what it is called in reports.
        flops: operations a second on matrix products, by dtype (``"bfloat16"``).
        bandwidth: bytes a second that an op reads and writes.
        memory: bytes of memory that a rank has.
        links: what connects ranks, the nearest first; the last one connects all.
        overhead: seconds that a call takes whatever it does.
        source: where the figures come from.
        pools: what connects the device with other memory, one way: that of its ``host``, and its ``disk``.
        curves: seconds of calls by how much they do, where they were measured: by the name of an op (``"gelu"``), or
            ``"product"``, ``"narrow product"``, ``"touch"`` and ``"view"`` for all others; in one dtype where it is
            named (``"product bfloat16"``), else in float32, and in other dtypes as much more or less as their products
            take.
        host_call, host_view: seconds that the host spends on a call, and on a view, while the device does earlier ones;
            0 where device and host are one.
        hides: whether a rank computes while it sends. Ranks that copy what they send to one another themselves do not.
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
        rates = {**{f"flops {dtype}": rate for dtype, rate in self.flops.items()}, "bandwidth": self.bandwidth}
        rates["memory"] = self.memory
        for what, rate in rates.items():
            if not (rate > 0 and math.isfinite(rate)):
                raise Error(f"machine {self.name!r}: {what} must be positive", expected="a number above 0", got=rate)
        for dtype in self.flops:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise Error(
                    f"machine {self.name!r}: unknown dtype", expected="a dtype of torch, as bfloat16", got=dtype
                )
        for name in self.pools.keys() - POOLS.keys():
            raise Error(f"machine {self.name!r}: no other memory is called so", expected=" or ".join(POOLS), got=name)
        if not self.flops or not self.overhead >= 0:
            raise Error(
                f"machine {self.name!r} needs a rate and an overhead that is not negative",
                expected="flops={dtype: rate, ...}, overhead=seconds",
                got=f"flops={dict(self.flops)}, overhead={self.overhead}",
            )
        if not self.links or self.links[-1].ranks is not None:
            raise Error(
                f"machine {self.name!r}: the last link must connect all ranks",
                expected="links, the last one without ranks",
                got=[level.name for level in self.links],
            )

    def rate(self, dtype: torch.dtype) -> float:
        """Operations a second in a dtype; of one that is not listed, as in the slowest."""
        return self.flops.get(str(dtype).removeprefix("torch."), min(self.flops.values()))

    def seconds(self, kind: str, flops: float, touched: float, dtype: torch.dtype) -> float:
        """Seconds of a call: measured ones of its kind, or what takes longer of computing, and of reading and writing.

        Args:
            kind: the name of an op, or ``"view"``.
            flops, touched: its operations, and the bytes that it reads and writes.
        """
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
        """Seconds by a curve; None where there is none."""
        own = self.curves.get(of_dtype(kind, dtype))
        if own is not None:
            return own.seconds(amount)
        curve = self.curves.get(kind)
        slower = self.rate(torch.float32) / self.rate(dtype) if computes else 1.0
        return curve.seconds(amount) * slower if curve is not None else None

    def pool(self, name: str) -> Link:
        """What connects the device with another pool of memory."""
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
    def of(cls, given: Machine | str | None) -> Machine:
        """A machine as hints give it: itself, a name or path, or None for the round figures."""
        return given if isinstance(given, Machine) else cls.load(DEFAULT if given is None else given)

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """A machine of known figures by its name, or one from a file.

        Raises:
            Error: there is no such machine, or the file does not describe one.
        """
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
        """The inverse of :meth:`json`."""
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
        """The machine at hand, measured in some ten seconds, on CUDA in some twenty: matrix products by dtype and size,
        a copy of memory, small ops, what connects it with the host, and some ops by their size, as programs call them.
        On a CPU of one thread the seconds are those that it worked; on CUDA those of the device, and apart from them
        what the host spends on calls. There, products, convolutions and attention run for a while before they are
        timed, at the clock that the device sustains. Products in float32 run as they are set to now
        (``torch.set_float32_matmul_precision``).

        Where a process group of several ranks is there, all of them call this together, and what connects them is
        measured as well: as one link between any two, whichever machine they are on; and all get the first rank's
        figures, so that they plan alike. Else the links are not measured, but those of the nearest known machine;
        ``source`` says which it was. The drive is not measured. Virtual ranks send nothing.

        Args:
            device: what computes; by default CUDA where there is one, else the CPU.
            name: what to call it.
        """
        at = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        like = cls.load("cpu-laptop" if at.type == "cpu" else "h100-dgx")
        measured = calibrate.link(at)
        links = like.links if measured is None else (Level("measured", measured),)
        bandwidth, overhead = calibrate.memory_bandwidth(at), calibrate.call_overhead(at)
        pools = {**POOLS, "host": calibrate.host_link(at, bandwidth, overhead)}
        of_links = f"links as of {like.name}" if measured is None else f"one link, among {dist.get_world_size()} ranks"
        clock = calibrate.clock(at)
        products = probes.products(at, clock)
        found = cls(
            name or f"measured {at.type}",
            {str(dtype).removeprefix("torch."): each.rate for dtype, each in products.items()},
            bandwidth,
            calibrate.memory_bytes(at),
            links,
            overhead,
            f"measured with torch {torch.__version__} on {calibrate.device_name(at)}; {of_links}",
            pools,
            probes.curves(at, clock, products),
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
