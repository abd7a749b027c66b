"""Layers that move and combine elements: windows, views, broadcasts, changes in place."""

from __future__ import annotations

from .shards import Kind, Pick, Shard, code, enters, module

KINDS: dict[str, Kind] = {}
kind = enters(KINDS)


# ---- convolution and pooling


@kind
def conv1d(p: Pick, t: int, d: int) -> Shard:
    groups = p.of(*sorted({g for g in (1, 2, d) if d % g == 0}))
    stride, dilation = p.of(1, 1, 2), p.of(1, 1, 2)
    out = d if groups != 1 else p.of(4, 6, 8)
    time = (t + 2 * dilation - 2 * dilation - 1) // stride + 1
    options = f"padding={dilation}, stride={stride}, dilation={dilation}, groups={groups}, bias={p.flag()}"
    return module(f"nn.Conv1d({d}, {out}, 3, {options})", time, out, "self.{n}(y.transpose(1, 2)).transpose(1, 2)")


@kind
def conv2d(p: Pick, t: int, d: int) -> Shard:
    height, out = p.divisor(t, 1, 2, 3, 4), p.of(4, 6, 8)
    lines = (
        f"y = y.transpose(1, 2).reshape(-1, {d}, {height}, {t // height})",
        "y = self.{n}(y)",
        "y = y.flatten(2).transpose(1, 2)",
    )
    inner = f"nn.Conv2d({d}, {out}, {p.of(1, 3)}, padding='same', bias={p.flag()})"
    if p.flag():
        inner = f"nn.Sequential({inner}, nn.BatchNorm2d({out}), nn.ReLU())"
    return Shard(t, out, lines, (("", inner),), 4)


@kind
def up_and_down(p: Pick, t: int, d: int) -> Shard:
    height = p.divisor(t, 1, 2, 3, 4)
    up = p.text("nn.Upsample(scale_factor=2)", f"nn.ConvTranspose2d({d}, {d}, 2, stride=2)")
    down = p.text("nn.MaxPool2d(2)", "nn.AvgPool2d(2)")
    lines = (f"y = y.transpose(1, 2).reshape(-1, {d}, {height}, {t // height})", "y = self.{n}(y)")
    return Shard(t, d, (*lines, "y = y.flatten(2).transpose(1, 2)"), (("", f"nn.Sequential({up}, {down})"),), 4)


@kind
def pool1d(p: Pick, t: int, d: int) -> Shard:
    inner = p.text("nn.MaxPool1d(2)", "nn.AvgPool1d(2)", f"nn.AdaptiveAvgPool1d({t // 2})")
    return module(inner, t // 2, d, "self.{n}(y.transpose(1, 2)).transpose(1, 2)")


# ---- moving


@kind
def split_cat(p: Pick, t: int, d: int) -> Shard:
    parts, dim = p.divisor(d, 1, 2, 3, 4), p.of(-1, -1, 1)
    if dim == 1:
        return code(t, d, f"y = torch.cat([y[:, {t // 2}:], 2 * y[:, :{t // 2}]], 1)")
    return code(t, d, f"y = torch.cat([z * (i + 1) for i, z in enumerate(reversed(y.chunk({parts}, -1)))], -1)")


@kind
def stacked(p: Pick, t: int, d: int) -> Shard:
    return code(
        t,
        d,
        p.text(
            "y = torch.stack([y, y.tanh()], 2).mean(2)",
            "y = torch.stack(y.unbind(1)[::-1], 1)",
            "y = torch.stack([y, -y], -1).flatten(2)[..., ::2]",
        ),
    )


@kind
def heads(p: Pick, t: int, d: int) -> Shard:
    many = p.divisor(d, 1, 2, 3, 4)
    first = f"y = y.view(y.shape[0], {t}, {many}, -1)"
    return code(
        t, d, first, p.text("y = y.transpose(1, 2).tanh().transpose(1, 2).flatten(2)", "y = (y * 2).flatten(2)")
    )


@kind
def shuffled(p: Pick, t: int, d: int) -> Shard:
    shift = p.of(*range(1, t))
    return code(
        t,
        d,
        p.text(
            f"y = y.roll({shift}, 1).flip(-1)",
            f"y = y[:, torch.arange({t - 1}, -1, -1)]",
            f"y = y.index_select(2, torch.arange({d}).flip(0))",
            f"y = y.permute(2, 0, 1).reshape({d}, -1).t().reshape(-1, {t}, {d})",
            f"y = y.gather(1, torch.arange({t}).flip(0)[None, :, None].expand(y.shape))",
            f"y = y.unsqueeze(1).expand(-1, 2, -1, -1).sum(1) + {shift}",
        ),
    )


@kind
def shorter(p: Pick, t: int, d: int) -> Shard:
    return code(t - 1, d, p.text("y = y[:, 1:]", "y = y[:, :-1]", f"y = y.narrow(1, 1, {t - 1})", "y = y.diff(dim=1)"))


@kind
def longer(p: Pick, t: int, d: int) -> Shard:
    return code(t + 1, d, p.text("y = F.pad(y, (0, 0, 1, 0))", "y = torch.cat([y, y.mean(1, keepdim=True)], 1)"))


@kind
def positions(p: Pick, t: int, d: int) -> Shard:
    members = (("", f"nn.Embedding({t + p.of(0, 3)}, {d})"),)
    return Shard(t, d, (f"y = y + self.{{n}}(torch.arange({t}))",), members, ndim=2)


# ---- elementwise, broadcasting, in place


@kind
def broadcast(p: Pick, t: int, d: int) -> Shard:
    shape = p.text(f"{d}", f"{t}, 1", f"1, 1, {d}", f"{t}, {d}", "1")
    line = p.text(
        "y = y + self.{n}_b",
        "y = y * self.{n}_b",
        "y = torch.sigmoid(y) - self.{n}_b",
        "y = y.sub(self.{n}_b, alpha=2)",
    )
    return code(t, d, line, b=f"torch.randn({shape})")


@kind
def masked(p: Pick, t: int, d: int) -> Shard:
    return code(
        t,
        d,
        p.text(
            f"y = y.masked_fill(torch.ones({t}, {d}, dtype=torch.bool).tril(), 0.5)",
            "y = torch.where(y > 0, y, 0.1 * y)",
            "y = y.clamp(-1, 1) + y.tril()",
            f"y = y * (torch.arange({t})[:, None] % 2 == 0)",
        ),
    )


@kind
def in_place(p: Pick, t: int, d: int) -> Shard:
    return code(
        t,
        d,
        "y = y.clone()",
        p.text(
            "y.mul_(2).add_(1)",
            "y[:, 0] = 0",
            "y[..., 1:].mul_(0.5)",
            "y[:, :2] += y[:, -2:]",
            "y.relu_()",
            "y.copy_(y.detach().mean() + y.tanh())",
        ),
    )
