"""Training steps of Hugging Face models by each strategy of context parallelism, compared with one device, and proven.

    python -m benchmarks.context_matrix [--models llama t5] [--how ring] [--cp 4] [--inputs packed] [--rows 24]
    python -m benchmarks.context_matrix --jobs 4 --log build/matrix.jsonl       goes on where it was interrupted

Decoders of two layers with 12 query heads and 2 key heads on 2, 3 and 4 virtual ranks of ``cp``; their inputs plain,
packed (two documents a sample, by ``position_ids``) and padded (by ``attention_mask``, on the left of one sample and
on the right of another). BERT, ViT, ModernBERT and T5 on dp=2 and tp=2. Windows are 7 rows. All is computed in float64:
norms and softmaxes that the models compute in float32 are replaced by those of torch.

``worst`` is the largest difference of loss and gradients, relative and absolute: ``|a - b| / (1 + |b|)``. Aim: at most
1e-12 in each row, and each proven. ``chosen`` is what planning made of the strategy: gather where there is no other.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

BOUND, VOCAB, BATCH = 1e-12, 64, 2
DECODERS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("GptOss", {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
"""The name of the classes, and of the config what is not of all."""
OTHERS = ("bert", "vit", "modernbert", "t5")
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")
STRATEGIES = ("gather", "all-to-all", "ring", "2d", "window", "auto")
INPUTS = ("plain", "packed", "padded")


class Cell(NamedTuple):
    """A model on a mesh: ``how`` is a strategy of context parallelism over some ranks, or an axis of the mesh."""

    model: str
    inputs: str
    how: str
    ranks: int
    rows: int


class Result(NamedTuple):
    """The strategies that were chosen, the largest difference, the verdict of the proof, and the seconds of all."""

    chosen: str
    worst: float
    verdict: str
    seconds: float


def cells(rows: int) -> Iterator[Cell]:
    """All cells."""
    for model in DECODERS:
        for inputs in INPUTS:
            for how in STRATEGIES:
                ranks = (4,) if how == "2d" else (2, 3, 4)
                yield from (Cell(model, inputs, how, n, rows) for n in ranks if how != "window" or model in WINDOWED)
    for model in OTHERS:
        for inputs in ("plain", *(["padded"] if model != "vit" else [])):
            yield from (Cell(model, inputs, how, 2, rows) for how in ("dp", "tp"))


def in_float64(model: nn.Module) -> nn.Module:
    """The model with torch's own norms in place of those that compute in float32."""
    for name, norm in [*model.named_modules()]:
        if "RMSNorm" in type(norm).__name__ or type(norm).__name__ == "T5LayerNorm":
            known: Any = norm
            eps = getattr(known, "eps", getattr(known, "variance_epsilon", 1e-6))
            model.set_submodule(name, nn.RMSNorm(norm.weight.shape, eps))  # type: ignore[arg-type]
    return model.double().train()


def decoder(name: str) -> nn.Module:
    """A small decoder of two layers."""
    import transformers

    kind, more = DECODERS[name]
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 128}
    config = getattr(transformers, f"{kind}TextConfig" if name == "gemma3" else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**sizes, pad_token_id=0, use_cache=False, **more))
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # which takes float64
        for layer in model.model.layers:
            nn.init.normal_(layer.self_attn.sinks)
    return in_float64(model)


def other(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model that is no decoder, and its specs on ``tp``."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **sizes))
        columns, rows = ("self.query", "self.key", "self.value"), ("**.output.dense",)
    elif name == "vit":
        config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=VOCAB, **sizes)
        model = transformers.ViTForImageClassification(config)
        columns, rows = ("q_proj", "k_proj", "v_proj", "fc1"), ("**.o_proj", "**.fc2")
    elif name == "modernbert":
        known = {key: each for key, each in sizes.items() if "dropout" not in key}
        config = transformers.ModernBertConfig(
            vocab_size=VOCAB, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0, **known
        )
        model = transformers.ModernBertForMaskedLM(config)
        columns, rows = (), ()
    else:
        config = transformers.T5Config(
            vocab_size=VOCAB, d_model=24, d_kv=6, d_ff=20, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
        )
        model = transformers.T5ForConditionalGeneration(config)
        columns, rows = ("q", "k", "v", "wi"), ("**.o", "**.wo")
    specs = {f"**.{each}.weight": "tp, -" for each in columns} | {f"{each}.weight": "-, tp" for each in rows}
    specs |= {"**.attn.Wqkv.weight": "tp, -", "**.attn.Wo.weight": "-, tp"} if name == "modernbert" else {}
    specs |= {"**.relative_attention_bias.weight": "-, tp"} if name == "t5" else {}
    return in_float64(model), specs


def arguments(cell: Cell) -> dict[str, Any]:
    """The keyword arguments of a model."""
    if cell.model == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, dtype=torch.float64)}
    ids = torch.randint(1, VOCAB, (BATCH, cell.rows))
    given: dict[str, Any] = {"input_ids": ids}
    if cell.model == "t5":
        given["decoder_input_ids"] = torch.randint(1, VOCAB, (BATCH, cell.rows))
    elif cell.model in DECODERS:
        given["use_cache"] = False
    if cell.inputs == "packed":
        first = cell.rows // 2 - 2
        places = torch.cat([torch.arange(first), torch.arange(cell.rows - first)])
        given["position_ids"] = places.expand(BATCH, -1)
    if cell.inputs == "padded":
        kept = torch.ones(BATCH, cell.rows, dtype=torch.int64)
        kept[0, :3] = kept[1, -2:] = 0
        given["attention_mask"] = kept
    return given


def loss(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, -2), labels.flatten())


def run(cell: Cell) -> Result:
    """Train one step on a mesh and on one device, and prove the plan."""
    import transformers

    transformers.logging.set_verbosity_error()
    begun = time.perf_counter()
    torch.manual_seed(0)
    softmax, F.softmax = F.softmax, lambda x, dim=None, **_: softmax(x, dim)
    try:
        chosen, worst, verdict = _compared(cell)
    except sx.Error as error:
        chosen, worst, verdict = "", float("nan"), str(error).partition("\n")[0]
    finally:
        F.softmax = softmax
    return Result(chosen, worst, verdict, time.perf_counter() - begun)


def _compared(cell: Cell) -> tuple[str, float, str]:
    model, specs = (decoder(cell.model), {}) if cell.model in DECODERS else other(cell.model)
    given = arguments(cell)
    labels = torch.randint(1, VOCAB, (BATCH, 1) if cell.model == "vit" else (BATCH, cell.rows))
    axes, mesh = "cp", sx.Mesh(cp=cell.ranks)
    tensors = [name for name, each in given.items() if isinstance(each, Tensor)]
    if cell.how in ("dp", "tp"):
        mesh = sx.Mesh(**{cell.how: cell.ranks})
        batch = {f"kwargs.{name}": ", ".join(["dp", *"-" * (given[name].dim() - 1)]) for name in tensors}
        batch |= {"targets.0": "dp, -"}
        specs = batch if cell.how == "dp" else specs
    else:
        if cell.how == "2d":
            axes, mesh = "rows heads", sx.Mesh(rows=2, heads=cell.ranks // 2)
        specs = dict.fromkeys(["targets.0", *(f"kwargs.{name}" for name in tensors)], f"-, {axes}")
        specs["**.self_attn"] = sx.Context(axes, how=cell.how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sx.ShardfxWarning)
        hints = sx.Hints(kwargs=given, loss=loss, targets=(labels,), specs=specs)
        pm = sx.parallelize(model, mesh, hints, virtual=True)
    found, expected = pm(labels, **given), loss(model(**given), labels)
    found.backward()
    expected.backward()
    grads = pm.full_grads()
    theirs = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    if {*theirs} != {*grads}:
        raise sx.Error("other parameters have gradients", got=str({*theirs} ^ {*grads}))
    pairs = [(found.detach(), expected.detach()), *((grads[name], each) for name, each in theirs.items())]
    worst = max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs)
    notes = [str(each).rpartition(": ")[2] for each in pm.planned.notes if str(each).startswith("context parallelism")]
    verdict = pm.verify()
    return "; ".join(notes) or cell.how, worst, "proven" if verdict else f"{verdict.status}: {verdict.why}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*DECODERS, *OTHERS])
    parser.add_argument("--how", nargs="+", default=[*STRATEGIES, "dp", "tp"])
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--inputs", nargs="+", default=[*INPUTS])
    parser.add_argument("--rows", type=int, default=24, help="of a sequence")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--log", type=Path, help="a file of results: those in it are printed, and not run again")
    args = parser.parse_args()
    wanted = [
        cell
        for cell in cells(args.rows)
        if cell.model in args.models and cell.how in args.how and cell.ranks in args.cp and cell.inputs in args.inputs
    ]
    lines = args.log.read_text().splitlines() if args.log and args.log.exists() else []
    known = {Cell(*cell): Result(*result) for cell, result in map(json.loads, lines)}
    print(f"{'model':11}{'inputs':8}{'how':11}{'ranks':>5}{'worst':>9}  {'verdict':9}{'s':>5}  chosen", flush=True)
    failed = 0
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        made = pool.map(run, [cell for cell in wanted if cell not in known])
        for cell in wanted:
            result = known.get(cell) or next(made)
            if args.log and cell not in known:
                with args.log.open("a") as log:
                    print(json.dumps([cell, result]), file=log)
            failed += not (result.worst <= BOUND and result.verdict == "proven")
            line = f"{cell.model:11}{cell.inputs:8}{cell.how:11}{cell.ranks:5}{result.worst:9.0e}  "
            print(f"{line}{result.verdict:9}{result.seconds:5.1f}  {result.chosen}", flush=True)
    print(f"{len(wanted)} cells, of which {failed} are not equal to one device within {BOUND} and proven")


if __name__ == "__main__":
    main()
