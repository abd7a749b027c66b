"""The layers that random models are made of: text of a module that takes ``y: [batch, time, dim]`` and keeps that rank.

A layer is drawn as its kind and a few numbers, and written for the sizes that come in: when a shrinker drops the layer
before it, it is written for other sizes, and is a layer still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUMBERS = 8
"""So many numbers a layer is drawn with."""


@dataclass
class Pick:
    """Choices by numbers that were drawn before."""

    numbers: Sequence[int]
    at: int = 0

    def of(self, *options: int) -> int:
        number = self.numbers[self.at % len(self.numbers)]
        self.at += 1
        return options[number % len(options)]

    def text(self, *options: str) -> str:
        return options[self.of(*range(len(options)))]

    def flag(self) -> bool:
        return bool(self.of(0, 1))

    def divisor(self, number: int, *options: int) -> int:
        return self.of(*(o for o in options if number % o == 0))


@dataclass(frozen=True)
class Piece:
    """What a layer adds to a model: ``self.NAME<suffix> = expression`` and statements; ``{n}`` is its name.

    ``ndim`` is that of the output of the module ``NAME``, where there is one.
    """

    time: int
    dim: int
    statements: tuple[str, ...]
    members: tuple[tuple[str, str], ...] = ()
    ndim: int = 0


Kind = Callable[[Pick, int, int], Piece]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def module(expression: str, time: int, dim: int, call: str = "self.{n}(y)") -> Piece:
    """A layer that is one module."""
    return Piece(time, dim, (f"y = {call}",), (("", expression),), 3)


def code(time: int, dim: int, *statements: str, **parameters: str) -> Piece:
    """A layer that is a few statements, with parameters ``self.{n}_NAME``."""
    members = tuple((f"_{name}", f"nn.Parameter({value})") for name, value in parameters.items())
    return Piece(time, dim, statements, members)


# ---- products


@kind
def linear(p: Pick, t: int, d: int) -> Piece:
    out = p.of(4, 6, 8, 12)
    return module(f"nn.Linear({d}, {out}, bias={p.flag()})", t, out)


@kind
def mlp(p: Pick, t: int, d: int) -> Piece:
    hidden, act = p.of(6, 8, 12, 16), p.text("ReLU", "GELU", "SiLU", "Tanh", "Softplus")
    return module(f"nn.Sequential(nn.Linear({d}, {hidden}), nn.{act}(), nn.Linear({hidden}, {d}))", t, d)


@kind
def gated(p: Pick, t: int, d: int) -> Piece:
    hidden = p.of(6, 8, 12)
    members = (("", f"nn.Linear({d}, {2 * hidden}, bias={p.flag()})"), ("_down", f"nn.Linear({hidden}, {d})"))
    return Piece(t, d, ("gate, up = self.{n}(y).chunk(2, -1)", "y = y + self.{n}_down(F.silu(gate) * up)"), members)


@kind
def twice(p: Pick, t: int, d: int) -> Piece:
    return module(f"nn.Linear({d}, {d})", t, d, "self.{n}(F.relu(self.{n}(y)))")


@kind
def merged_rows(p: Pick, t: int, d: int) -> Piece:
    return code(t, d, f"y = (y.reshape(-1, {d}) @ self.{{n}}_w).reshape(y.shape)", w=f"torch.randn({d}, {d}) / 3")


@kind
def mixed_time(p: Pick, t: int, d: int) -> Piece:
    return code(t, d, "y = torch.einsum('btd,ts->bsd', y, self.{n}_w)", w=f"torch.randn({t}, {t}) / 3")


@kind
def outer(p: Pick, t: int, d: int) -> Piece:
    return code(t, d, f"y = torch.bmm(torch.bmm(y, y.transpose(1, 2)) / {d}, y)")


@kind
def experts(p: Pick, t: int, d: int) -> Piece:
    many = p.of(2, 3, 4)
    return Piece(
        t,
        d,
        ("y = torch.einsum('btd,edf,bte->btf', y, self.{n}_w, self.{n}(y).softmax(-1))",),
        (("", f"nn.Linear({d}, {many})"), ("_w", f"nn.Parameter(torch.randn({many}, {d}, {d}) / 3)")),
    )


# ---- attention


@kind
def attention(p: Pick, t: int, d: int) -> Piece:
    heads = p.divisor(d, 1, 2, 3, 4)
    kv = p.divisor(heads, 1, 2, 3, 4)
    width, causal = d // heads, p.flag()
    fused = p.flag() and kv == heads
    members = [("_o", f"nn.Linear({d}, {d}, bias={p.flag()})")]
    if fused:
        members.append(("", f"nn.Linear({d}, {3 * d})"))
        lines = [f"q, k, v = self.{{n}}(y).split({d}, -1)"]
    else:
        members += [("", f"nn.Linear({d}, {d})"), ("_kv", f"nn.Linear({d}, {2 * kv * width}, bias=False)")]
        lines = [f"q, (k, v) = self.{{n}}(y), self.{{n}}_kv(y).split({kv * width}, -1)"]
    lines += [
        f"q = q.view(-1, {t}, {heads}, {width}).transpose(1, 2)",
        f"k, v = (z.view(-1, {t}, {kv}, {width}).transpose(1, 2) for z in (k, v))",
    ]
    way = p.of(0, 1, 2)
    if way == 0:
        lines.append(f"k, v = (z.repeat_interleave({heads // kv}, 1) for z in (k, v))")
        lines.append(f"a = F.scaled_dot_product_attention(q, k, v, is_causal={causal})")
    elif way == 1:
        gqa = ", enable_gqa=True" if kv != heads else ""
        lines.append(f"a = F.scaled_dot_product_attention(q, k, v, is_causal={causal}{gqa})")
    else:
        lines.append(f"k, v = (z.repeat_interleave({heads // kv}, 1) for z in (k, v))")
        lines.append(f"s = q @ k.transpose(-1, -2) / {width**0.5:.3f}")
        if causal:
            lines.append(f"s = s.masked_fill(torch.ones({t}, {t}, dtype=torch.bool).triu(1), -1e9)")
        lines.append("a = s.softmax(-1) @ v")
    lines.append(f"y = y + self.{{n}}_o(a.transpose(1, 2).reshape(-1, {t}, {d}))")
    return Piece(t, d, tuple(lines), tuple(members))


@kind
def rotary(p: Pick, t: int, d: int) -> Piece:
    lines = (
        f"angle = torch.arange({t}, dtype=y.dtype)[:, None] / torch.arange(1, {d // 2 + 1}, dtype=y.dtype)",
        "angle = torch.cat([angle, angle], -1)",
        f"y = y * angle.cos() + torch.cat([-y[..., {d // 2}:], y[..., :{d // 2}]], -1) * angle.sin()",
    )
    return Piece(t, d, lines)


# ---- norms, statistics, buffers


@kind
def layer_norm(p: Pick, t: int, d: int) -> Piece:
    return module(p.text(f"nn.LayerNorm({d})", f"nn.LayerNorm({d}, bias=False)", f"nn.LayerNorm(({t}, {d}))"), t, d)


@kind
def rms_norm(p: Pick, t: int, d: int) -> Piece:
    if p.flag():
        return module(f"nn.RMSNorm({d}, eps=1e-3)", t, d)
    return code(t, d, "y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-3) * self.{n}_w", w=f"torch.rand({d})")


@kind
def batch_norm(p: Pick, t: int, d: int) -> Piece:
    return module(f"nn.BatchNorm1d({d})", t, d, "self.{n}(y.transpose(1, 2)).transpose(1, 2)")


@kind
def group_norm(p: Pick, t: int, d: int) -> Piece:
    groups = p.divisor(d, 1, 2, 3, 4)
    return module(f"nn.GroupNorm({groups}, {d})", t, d, "self.{n}(y.transpose(1, 2)).transpose(1, 2)")


@kind
def running_mean(p: Pick, t: int, d: int) -> Piece:
    lines = (
        "if self.training:",
        "    self.{n}.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))",
        "y = y - self.{n}" if p.flag() else "y = y * 0.5",
    )
    return Piece(t, d, lines, (("", f"nn.Buffer(torch.zeros({d}))"),))


@kind
def statistics(p: Pick, t: int, d: int) -> Piece:
    return code(
        t,
        d,
        p.text(
            "y = y - y.mean(1, keepdim=True)",
            "y = y - y.amax(-1, keepdim=True)",
            "y = y / (1 + y.var((0, 1), keepdim=True))",
            "y = y / (1 + y.norm(dim=-1, keepdim=True))",
            "y = y - y.logsumexp(1, keepdim=True)",
            "y = y.cumsum(1) / 4",
            "y = y - y.mean((0, 2), keepdim=True)",
            "y = y + y.sum() / 100",
        ),
    )


@kind
def softmax(p: Pick, t: int, d: int) -> Piece:
    return code(t, d, p.text("y = y.softmax(-1)", "y = y.log_softmax(1)", "y = y.softmax(1)", "y = F.normalize(y)"))


@kind
def nothing(p: Pick, t: int, d: int) -> Piece:
    return Piece(t, d, ("y = self.{n}(y)",), (("", p.text("nn.Dropout(0.0)", "nn.Identity()")),))


# ---- convolution and pooling


@kind
def conv1d(p: Pick, t: int, d: int) -> Piece:
    groups = p.of(*sorted({g for g in (1, 2, d) if d % g == 0}))
    stride, dilation = p.of(1, 1, 2), p.of(1, 1, 2)
    out = d if groups != 1 else p.of(4, 6, 8)
    time = (t + 2 * dilation - 2 * dilation - 1) // stride + 1
    options = f"padding={dilation}, stride={stride}, dilation={dilation}, groups={groups}, bias={p.flag()}"
    return module(f"nn.Conv1d({d}, {out}, 3, {options})", time, out, "self.{n}(y.transpose(1, 2)).transpose(1, 2)")


@kind
def conv2d(p: Pick, t: int, d: int) -> Piece:
    height, out = p.divisor(t, 1, 2, 3, 4), p.of(4, 6, 8)
    lines = (
        f"y = y.transpose(1, 2).reshape(-1, {d}, {height}, {t // height})",
        "y = self.{n}(y)",
        "y = y.flatten(2).transpose(1, 2)",
    )
    inner = f"nn.Conv2d({d}, {out}, {p.of(1, 3)}, padding='same', bias={p.flag()})"
    if p.flag():
        inner = f"nn.Sequential({inner}, nn.BatchNorm2d({out}), nn.ReLU())"
    return Piece(t, out, lines, (("", inner),), 4)


@kind
def up_and_down(p: Pick, t: int, d: int) -> Piece:
    height = p.divisor(t, 1, 2, 3, 4)
    up = p.text("nn.Upsample(scale_factor=2)", f"nn.ConvTranspose2d({d}, {d}, 2, stride=2)")
    down = p.text("nn.MaxPool2d(2)", "nn.AvgPool2d(2)")
    lines = (f"y = y.transpose(1, 2).reshape(-1, {d}, {height}, {t // height})", "y = self.{n}(y)")
    return Piece(t, d, (*lines, "y = y.flatten(2).transpose(1, 2)"), (("", f"nn.Sequential({up}, {down})"),), 4)


@kind
def pool1d(p: Pick, t: int, d: int) -> Piece:
    inner = p.text("nn.MaxPool1d(2)", "nn.AvgPool1d(2)", f"nn.AdaptiveAvgPool1d({t // 2})")
    return module(inner, t // 2, d, "self.{n}(y.transpose(1, 2)).transpose(1, 2)")


# ---- moving


@kind
def split_cat(p: Pick, t: int, d: int) -> Piece:
    parts, dim = p.divisor(d, 1, 2, 3, 4), p.of(-1, -1, 1)
    if dim == 1:
        return code(t, d, f"y = torch.cat([y[:, {t // 2}:], 2 * y[:, :{t // 2}]], 1)")
    return code(t, d, f"y = torch.cat([z * (i + 1) for i, z in enumerate(reversed(y.chunk({parts}, -1)))], -1)")


@kind
def stacked(p: Pick, t: int, d: int) -> Piece:
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
def heads(p: Pick, t: int, d: int) -> Piece:
    many = p.divisor(d, 1, 2, 3, 4)
    first = f"y = y.view(y.shape[0], {t}, {many}, -1)"
    return code(
        t, d, first, p.text("y = y.transpose(1, 2).tanh().transpose(1, 2).flatten(2)", "y = (y * 2).flatten(2)")
    )


@kind
def shuffled(p: Pick, t: int, d: int) -> Piece:
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
def shorter(p: Pick, t: int, d: int) -> Piece:
    return code(t - 1, d, p.text("y = y[:, 1:]", "y = y[:, :-1]", f"y = y.narrow(1, 1, {t - 1})", "y = y.diff(dim=1)"))


@kind
def longer(p: Pick, t: int, d: int) -> Piece:
    return code(t + 1, d, p.text("y = F.pad(y, (0, 0, 1, 0))", "y = torch.cat([y, y.mean(1, keepdim=True)], 1)"))


@kind
def positions(p: Pick, t: int, d: int) -> Piece:
    members = (("", f"nn.Embedding({t + p.of(0, 3)}, {d})"),)
    return Piece(t, d, (f"y = y + self.{{n}}(torch.arange({t}))",), members, ndim=2)


# ---- elementwise, broadcasting, in place


@kind
def broadcast(p: Pick, t: int, d: int) -> Piece:
    shape = p.text(f"{d}", f"{t}, 1", f"1, 1, {d}", f"{t}, {d}", "1")
    line = p.text(
        "y = y + self.{n}_b",
        "y = y * self.{n}_b",
        "y = torch.sigmoid(y) - self.{n}_b",
        "y = y.sub(self.{n}_b, alpha=2)",
    )
    return code(t, d, line, b=f"torch.randn({shape})")


@kind
def masked(p: Pick, t: int, d: int) -> Piece:
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
def in_place(p: Pick, t: int, d: int) -> Piece:
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
