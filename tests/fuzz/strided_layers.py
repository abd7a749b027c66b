"""Layers of strided views: windows that overlap, of values and of weights, at an offset or not."""

from __future__ import annotations

from .shards import Kind, Pick, Shard, code, enters

KINDS: dict[str, Kind] = {}
kind = enters(KINDS)


@kind
def strided(p: Pick, t: int, d: int) -> Shard:
    dense = p.text("y.clone(memory_format=torch.contiguous_format)", "(y * 1).contiguous()")
    row, shape = t * d, f"(y.shape[0], {t}, {d})"
    turned = code(t, d, f"y = {dense}.tanh()", f"y = y.as_strided({shape}, ({row}, 1, {t})) + y")
    if t < 2:
        return turned
    copied = p.text("y.as_strided", "torch.as_strided_copy")
    size, stride = f"(y.shape[0], {t - 1}, 2, {d})", f"({row}, {d}, {d}, 1)"
    windows = f"y.as_strided({size}, {stride})" if copied == "y.as_strided" else f"{copied}(y, {size}, {stride})"
    later = f"y = y.as_strided((y.shape[0], {t - 1}, {d}), ({row}, {d}, 1), {d}) + y[:, 1:]"
    at = p.text("0", f"{d}")
    scattered = f"y = torch.as_strided_scatter(y.detach(), y[:, 0], (y.shape[0], {d}), ({row}, 1), {at}) + y"
    columns = (
        f"y = sum(z.as_strided({shape}, ({row}, {d}, 1), 0) for z in (y.transpose(1, 2).clone(), y.tanh(), y.sin()))"
    )
    weight, first = (("w", 0), ("w.t()", 0), ("w[1:]", d), ("w.detach()", 0))[p.of(0, 1, 2, 3)]
    view = f"self.{{n}}_{weight}.as_strided(({d},), (2,), {first + p.of(0, 1, d)})"
    weighted = f"y = y * {view} + (self.{{n}}_v + self.{{n}}_w).mean(0)"
    return (
        turned,
        code(t - 1, d, f"y = {dense}", f"y = {windows}.tanh().sum(2)"),
        code(t - 1, d, f"y = {dense}", later),
        code(t, d, f"y = {dense}", scattered),
        code(t, d, columns),
        code(t, d, f"y = {dense}", columns),
        *3 * (code(t, d, weighted, w=f"torch.randn(4, {d})", v=f"torch.randn(4, {d})"),),
    )[p.of(*range(9))]
