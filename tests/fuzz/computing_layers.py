"""Layers that compute: products, attention, norms and statistics."""

from __future__ import annotations

from .shards import Kind, Pick, Shard, code, enters, module

KINDS: dict[str, Kind] = {}
kind = enters(KINDS)


# ---- products


@kind
def linear(p: Pick, t: int, d: int) -> Shard:
    out = p.of(4, 6, 8, 12)
    return module(f"nn.Linear({d}, {out}, bias={p.flag()})", t, out)


@kind
def mlp(p: Pick, t: int, d: int) -> Shard:
    hidden, act = p.of(6, 8, 12, 16), p.text("ReLU", "GELU", "SiLU", "Tanh", "Softplus")
    return module(f"nn.Sequential(nn.Linear({d}, {hidden}), nn.{act}(), nn.Linear({hidden}, {d}))", t, d)


@kind
def gated(p: Pick, t: int, d: int) -> Shard:
    hidden = p.of(6, 8, 12)
    members = (("", f"nn.Linear({d}, {2 * hidden}, bias={p.flag()})"), ("_down", f"nn.Linear({hidden}, {d})"))
    return Shard(t, d, ("gate, up = self.{n}(y).chunk(2, -1)", "y = y + self.{n}_down(F.silu(gate) * up)"), members)


@kind
def twice(p: Pick, t: int, d: int) -> Shard:
    return module(f"nn.Linear({d}, {d})", t, d, "self.{n}(F.relu(self.{n}(y)))")


@kind
def merged_rows(p: Pick, t: int, d: int) -> Shard:
    return code(t, d, f"y = (y.reshape(-1, {d}) @ self.{{n}}_w).reshape(y.shape)", w=f"torch.randn({d}, {d}) / 3")


@kind
def mixed_time(p: Pick, t: int, d: int) -> Shard:
    return code(t, d, "y = torch.einsum('btd,ts->bsd', y, self.{n}_w)", w=f"torch.randn({t}, {t}) / 3")


@kind
def outer(p: Pick, t: int, d: int) -> Shard:
    return code(t, d, f"y = torch.bmm(torch.bmm(y, y.transpose(1, 2)) / {d}, y)")


@kind
def experts(p: Pick, t: int, d: int) -> Shard:
    many = p.of(2, 3, 4)
    return Shard(
        t,
        d,
        ("y = torch.einsum('btd,edf,bte->btf', y, self.{n}_w, self.{n}(y).softmax(-1))",),
        (("", f"nn.Linear({d}, {many})"), ("_w", f"nn.Parameter(torch.randn({many}, {d}, {d}) / 3)")),
    )


# ---- attention


@kind
def attention(p: Pick, t: int, d: int) -> Shard:
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
    return Shard(t, d, tuple(lines), tuple(members))


@kind
def rotary(p: Pick, t: int, d: int) -> Shard:
    lines = (
        f"angle = torch.arange({t}, dtype=y.dtype)[:, None] / torch.arange(1, {d // 2 + 1}, dtype=y.dtype)",
        "angle = torch.cat([angle, angle], -1)",
        f"y = y * angle.cos() + torch.cat([-y[..., {d // 2}:], y[..., :{d // 2}]], -1) * angle.sin()",
    )
    return Shard(t, d, lines)


# ---- norms, statistics, buffers


@kind
def layer_norm(p: Pick, t: int, d: int) -> Shard:
    return module(p.text(f"nn.LayerNorm({d})", f"nn.LayerNorm({d}, bias=False)", f"nn.LayerNorm(({t}, {d}))"), t, d)


@kind
def rms_norm(p: Pick, t: int, d: int) -> Shard:
    if p.flag():
        return module(f"nn.RMSNorm({d}, eps=1e-3)", t, d)
    return code(t, d, "y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-3) * self.{n}_w", w=f"torch.rand({d})")


@kind
def batch_norm(p: Pick, t: int, d: int) -> Shard:
    return module(f"nn.BatchNorm1d({d})", t, d, "self.{n}(y.transpose(1, 2)).transpose(1, 2)")


@kind
def group_norm(p: Pick, t: int, d: int) -> Shard:
    groups = p.divisor(d, 1, 2, 3, 4)
    return module(f"nn.GroupNorm({groups}, {d})", t, d, "self.{n}(y.transpose(1, 2)).transpose(1, 2)")


@kind
def running_mean(p: Pick, t: int, d: int) -> Shard:
    lines = (
        "if self.training:",
        "    self.{n}.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))",
        "y = y - self.{n}" if p.flag() else "y = y * 0.5",
    )
    return Shard(t, d, lines, (("", f"nn.Buffer(torch.zeros({d}))"),))


@kind
def statistics(p: Pick, t: int, d: int) -> Shard:
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
def softmax(p: Pick, t: int, d: int) -> Shard:
    return code(t, d, p.text("y = y.softmax(-1)", "y = y.log_softmax(1)", "y = y.softmax(1)", "y = F.normalize(y)"))


@kind
def nothing(p: Pick, t: int, d: int) -> Shard:
    return Shard(t, d, ("y = self.{n}(y)",), (("", p.text("nn.Dropout(0.0)", "nn.Identity()")),))
