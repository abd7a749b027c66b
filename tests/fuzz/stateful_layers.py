"""Layers that write values with a gradient to buffers, and layers with complex parameters."""

from __future__ import annotations

from .shards import Kind, Pick, Shard, code, enters

KINDS: dict[str, Kind] = {}
kind = enters(KINDS)


@kind
def written_buffer(p: Pick, t: int, d: int) -> Shard:
    value = p.text("0.1 * y.mean((0, 1))", "y[0, 0]", "(y * y).sum((0, 1)) / 50")
    write = p.text(
        f"mul_(0.9).add_({value})",
        f"lerp_(({value}).double(), 0.3)",
        f"copy_({value})",
        f"[: {d // 2}].add_(({value})[0])",
    )
    sharding = p.flag()
    before = ["    self.{n}.detach_()"] if sharding else []
    read = p.text("y = y - self.{n}", "y = y + self.{n}.tanh()") if sharding else "y = y * self.{n}.detach()"
    write = write if write.startswith("[") else f".{write}"
    lines = ("if self.training:", *before, f"    self.{{n}}{write}", p.text(read, read, "y = y * 0.5"))
    return Shard(t, d, lines, (("", f"nn.Buffer(torch.zeros({d}))"),))


@kind
def complex_weight(p: Pick, t: int, d: int) -> Shard:
    value = p.text("z = torch.complex(y, 1 - y)", "z = torch.polar(F.softplus(y), y)", "z = y + 1j * y.roll(1, -1)")
    weight, shape = p.text("z = z @ w", "z = z * w", "z = z * w"), f"({d}, {d})"
    if "@" not in weight:
        shape = p.text(f"({d},)", "()", f"({t}, {d})")
    real = p.text(
        "z.real + z.imag", "z.abs()", f"torch.view_as_real(z).flatten(-2)[..., :{d}]", "(z * z.conj()).real / 9"
    )
    lines = (value, "w = self.{n}_w.to(z.dtype)", weight, f"y = ({real}).to(y.dtype)")
    return code(t, d, *lines, w=f"torch.randn({shape}, dtype=torch.complex128) / 2")


@kind
def spectral_filter(p: Pick, t: int, d: int) -> Shard:
    lines = ("z = torch.fft.rfft(y, dim=1)", f"y = y + torch.fft.irfft(z * self.{{n}}_w.to(z.dtype), n={t}, dim=1)")
    return code(t, d, *lines, w=f"torch.randn({t // 2 + 1}, {d}, dtype=torch.complex128) / 2")
