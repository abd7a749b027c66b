"""Mixtures of experts over ranks: unedited models of transformers, drawn routings, steps that need more room."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.collective_counts import count_collectives
from tests.reference import check_step

transformers = pytest.importorskip("transformers")
deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, "num_experts_per_tok": 2}
FEW = {"moe_intermediate_size": 12, "num_experts": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3": ("Qwen3Moe", {"head_dim": 4, **FEW}),
    "deepseek": ("DeepseekV3", {"num_key_value_heads": 4, "moe_intermediate_size": 12, **LATENT, **GROUPS}),
    "gpt-oss": ("GptOss", {"num_local_experts": 8, "head_dim": 4, "pad_token_id": 0}),
    "olmoe": ("Olmoe", {"num_experts": 8, "eos_token_id": 1}),
    "granite": ("GraniteMoe", {"num_local_experts": 8}),
}
IDS = torch.arange(64).reshape(8, 8) * 7 % 48


def loss(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())


def model(name: str, **more: Any) -> tuple[nn.Module, nn.Module]:
    """A model in float64 as it is, and a copy that loops over its experts, as float64 needs on one device."""
    torch.manual_seed(0)
    kind, config = MODELS[name]
    made = getattr(transformers, f"{kind}Config")(**{**SIZES, **config, **more})
    made = getattr(transformers, f"{kind}ForCausalLM")(made).double().train()
    alone = deepcopy(made)
    alone.set_experts_implementation("eager")
    return made, alone


def routed_in_float64() -> Callable[..., Any]:
    """DeepSeek's router, which computes in float32."""
    source = inspect.getsource(deepseek.DeepseekV3TopkRouter.forward).replace("torch.float32", "torch.float64")
    made: dict[str, Any] = {}
    exec(textwrap.dedent(source), vars(deepseek), made)
    return made["forward"]  # type: ignore[no-any-return]


def plan(made: nn.Module, mesh: sx.Mesh, specs: Any, tokens: str = "", **more: Any) -> sx.ParallelModule:
    tokens = tokens or f"{' '.join(axis for axis in mesh.names if axis in ('dp', 'ep'))}, -"
    given = {"args.0": tokens, "targets.0": tokens, **specs}
    hints = sx.Hints(args=(IDS,), targets=(IDS,), loss=loss, specs=given, **more)
    return sx.parallelize(made, mesh, hints, virtual=True)


def comm(pm: sx.ParallelModule, kind: str) -> int:
    return sum(row.calls for row in pm.report().communication.rows if row.kind == kind)


EP = {"**.experts": sx.Experts("ep")}
EP_TP = {"**.experts.gate_up_proj": "ep, tp, -", "**.experts.down_proj": "ep, -, tp"}
PLANS: dict[str, tuple[sx.Mesh, dict[str, Any], str]] = {
    "ep": (sx.Mesh(ep=2), EP, ""),
    "ep of four": (sx.Mesh(ep=4), EP, ""),
    "dp, ep": (sx.Mesh(dp=2, ep=2), EP, ""),
    "ep, tp": (sx.Mesh(ep=2, tp=2), EP_TP, ""),
}


@pytest.mark.long
@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_expert_parallel_matches_single_device(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepseek.DeepseekV3TopkRouter, "forward", routed_in_float64())
    mesh, specs, tokens = PLANS[how]
    if name == "gpt-oss" and how == "ep, tp":  # its matrices are transposed
        specs = {"**.experts.gate_up_proj": "ep, -, tp", "**.experts.down_proj": "ep, tp, -"}
    made, alone = model(name)
    pm = plan(made, mesh, specs, tokens)
    layers = 1 if name == "deepseek" else 2
    assert comm(pm, "dispatch") == comm(pm, "combine") == 2 * layers
    check_step(pm, alone, loss, (IDS,), (IDS,), bound=1e-12)


OTHERS: dict[str, tuple[sx.Mesh, dict[str, Any], str, dict[str, Any]]] = {
    "tokens on all": (sx.Mesh(ep=2), EP, "-, -", {}),
    "tokens over dp": (sx.Mesh(dp=2, ep=2), EP, "dp, -", {}),
    "a sequence": (sx.Mesh(dp=2, cp=2), {"**.experts": sx.Experts("dp cp")}, "dp, cp", {}),
    "a sequence alone": (sx.Mesh(dp=2, cp=2), {"**.experts": sx.Experts("cp")}, "dp, cp", {}),
    "axes in another order": (sx.Mesh(ep=2, dp=2), {"**.experts": sx.Experts("dp ep")}, "ep dp, -", {}),
    "attention tp, experts ep": (sx.Mesh(tp=2, ep=2), {"**.experts": sx.Experts("tp ep")}, "ep, -", {}),
    "zero": (sx.Mesh(dp=2, ep=2), EP, "", {"zero": 3, "zero_min_numel": 1}),
    "recompute": (sx.Mesh(ep=2), EP, "", {"recompute": "model.layers.*"}),
    "loop": (sx.Mesh(ep=2, mb=sx.Loop(2)), EP, "mb ep, -", {}),
    "pipeline": (sx.Mesh(pp=2, ep=2, mb=sx.Loop(2)), EP, "mb ep, -", {"pipeline": sx.Pipeline()}),
    "guards": (sx.Mesh(ep=2), EP, "", {"guard": True}),
    "data alone": (sx.Mesh(dp=4), {}, "dp, -", {}),
    "tensors alone": (sx.Mesh(tp=2), {key: each.replace("ep", "-") for key, each in EP_TP.items()}, "-, -", {}),
    "experts that ranks do not divide": (sx.Mesh(ep=3), {"**.experts.*": "ep, -, -"}, "-, -", {}),
}


@pytest.mark.long
@pytest.mark.parametrize("how", OTHERS)
def test_experts_with_other_parallelism_match_single_device(how: str) -> None:
    mesh, specs, tokens, more = OTHERS[how]
    made, alone = model("mixtral", num_hidden_layers=4 if how == "pipeline" else 2)
    check_step(plan(made, mesh, specs, tokens, **more), alone, loss, (IDS,), (IDS,), bound=1e-12)


@pytest.mark.long
def test_the_loss_of_the_router_is_that_of_all_tokens() -> None:
    def with_router(out: Any, labels: Tensor) -> Tensor:
        return loss(out, labels) + out.aux_loss

    made, alone = model("mixtral", output_router_logits=True)
    specs = {"args.0": "ep, -", "targets.0": "ep, -", **EP}
    hints = sx.Hints(args=(IDS,), targets=(IDS,), loss=with_router, specs=specs)
    check_step(
        sx.parallelize(made, sx.Mesh(ep=2), hints, virtual=True), alone, with_router, (IDS,), (IDS,), bound=1e-12
    )


# ---- one layer, whose ids are inputs --------------------------------------------------------------------------------


class Layer(nn.Module):
    """Mixtral's experts, with the ids that it is given."""

    def __init__(self) -> None:
        super().__init__()
        kind, config = MODELS["mixtral"]
        made = getattr(transformers, f"{kind}Config")(**{**SIZES, **config})
        self.config = made
        self.norm = nn.Linear(16, 16)
        self.experts = transformers.models.mixtral.modeling_mixtral.MixtralExperts(made)
        for each in self.experts.parameters():
            nn.init.normal_(each)
        made._experts_implementation = "eager"

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.experts(self.norm(x), ids, weights)


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def routed(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(32, 16, generator=draw).double(), torch.rand(32, 2, generator=draw).double()
    ids = torch.randint(4, (32, 2), generator=draw)
    kind = seed % 5
    if kind == 1:
        ids = torch.full_like(ids, seed % 4)  # all to one expert, twice
    elif kind == 2:
        ids = ids.clamp(max=1)  # two experts get nothing, and so does one of two ranks
    elif kind == 3:
        ids = torch.rand(32, 4, generator=draw).topk(2, -1).indices
    return x, ids, weights


def layer(capacity: float = 1.25, virtual: bool | None = True, **more: Any) -> tuple[sx.ParallelModule, nn.Module]:
    torch.manual_seed(0)
    made = Layer().double()
    specs = {f"args.{i}": "ep, -" for i in range(3)} | {"experts": sx.Experts("ep", capacity)}
    hints = sx.Hints(args=routed(), loss=squares, specs=specs, **more)
    return sx.parallelize(made, sx.Mesh(ep=2), hints, virtual=virtual), deepcopy(made)


@pytest.mark.long
def test_drawn_routings_match_single_device() -> None:
    pm, alone = layer()
    for seed in range(50):
        pm.zero_grad()
        alone.zero_grad()
        check_step(pm, alone, squares, routed(seed), bound=1e-12, proven=not seed)
    assert any("twice the mean" in each for each in pm.report().warnings)


@pytest.mark.long
def test_a_step_without_room_is_bitwise_that_of_the_larger_capacity() -> None:
    """Ten steps inside the plan, of which some need twice the room, and some room for all rows."""
    updated = {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.1), "clip_grad_norm": 1.0}
    (small, _), (large, _) = layer(1.0, **updated), layer(1e9, **updated)
    for seed in range(10):
        assert torch.equal(small.step(*routed(seed)), large.step(*routed(seed)))
    theirs = large.full_state_dict()
    assert all(torch.equal(each, theirs[name]) for name, each in small.full_state_dict().items())
    assert "experts.check_room" in small.rank_module(0).code.replace("shardfx_ir_ops_experts_dispatch_", "experts.")
    assert not any("room" in each for each in large.report().warnings)


def test_a_step_that_runs_again_draws_the_same_random_numbers() -> None:
    class Dropped(Layer):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, self.training), ids, weights)

    torch.manual_seed(0)
    made, found = Dropped().double(), []
    for capacity in (0.5, 1e9):
        specs = {f"args.{i}": "ep, -" for i in range(3)} | {"experts": sx.Experts("ep", capacity)}
        hints = sx.Hints(args=routed(), loss=squares, specs=specs)
        pm = sx.parallelize(deepcopy(made), sx.Mesh(ep=2), hints, virtual=True)
        torch.manual_seed(1)
        found.append([pm(*routed(seed)) for seed in range(3)])
    assert all(map(torch.equal, *found))


@pytest.mark.long
def test_programs_that_run_alone_refuse_steps_without_room(tmp_path: Path) -> None:
    """Saved ones check the count as they check guards; those that a user changed would run with more room unchanged."""
    pm, _ = layer(0.5)
    pm(*routed(3))
    assert pm.verify() and any("twice the mean" in each for each in pm.report().warnings)
    pm, _ = layer(0.5)
    pm.save_programs(tmp_path)
    assert 'rows of experts without room": (0, ' in (tmp_path / "rank0.py").read_text()
    pm.use({0: pm.rank_module(0)})
    with pytest.raises(sx.Error, match="have no room for all rows"):
        pm(*routed(1))


@pytest.mark.long
def test_experts_of_one_token_are_proven() -> None:
    """Fewer tokens than ranks: each has the token, and computes its own experts."""
    made, _ = model("mixtral", num_hidden_layers=1)
    ids, specs = IDS[:1, :1], {"args.0": "ep, -", "targets.0": "ep, -", **EP}
    pm = sx.parallelize(
        made, sx.Mesh(ep=2), sx.Hints(args=(ids,), targets=(ids,), loss=loss, specs=specs), virtual=True
    )
    assert pm.verify()


def test_dispatch_sends_its_room_and_no_weights() -> None:
    """Rows to the other rank and back, forward and backward: 1.25 x half of them, and counts of them."""
    pm, _ = layer()
    x, ids, weights = routed(3)
    ids = torch.stack([torch.arange(32) % 4, (torch.arange(32) + 1) % 4], 1)
    with count_collectives() as counts:
        pm(x, ids, weights).backward()
    assert {op for op, _ in counts} == {"all_to_all_single", "all_reduce"}
    sent = sum(count.nbytes for (op, _), count in counts.items() if op == "all_to_all_single")
    rows = 4 * (1 - 1 / 2) * 16 * 2 * 16 * 8
    assert sent == pytest.approx(1.25 * rows + 16, rel=0.01)


def test_a_saved_plan_has_its_experts(tmp_path: Path) -> None:
    pm, _ = layer(1.5)
    known = sx.Plan.load(pm.plan.save(tmp_path / "plan.json"))
    assert known.specs["experts"] == sx.Experts("ep", 1.5)
    again = sx.parallelize(
        Layer().double(), known.mesh, sx.Hints(args=routed(), loss=squares, specs=known.specs), virtual=True
    )
    assert not known.differences(again.planned)


class Sorted(nn.Module):
    """Experts that sort their rows, as torchtitan writes them, with each way back to the tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.router = how, nn.Linear(16, 4, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(4, 24, 16) * 0.3) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(4, 16, 24) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.router(x).float().softmax(-1).topk(2, -1)
        counts = torch.histc(ids.view(-1).float(), bins=4, min=0, max=4)
        order = torch.argsort(ids.view(-1), stable=True)
        top, tokens = top.view(-1)[order][:, None], order // 2
        index = tokens[:, None].expand(-1, 16)
        rows = torch.gather(x, 0, index)
        if self.how == "weighted before":
            rows = (rows.float() * top).to(x.dtype)
        if self.how == "broadcast over columns":  # as many as rows
            rows = rows * top[:, 0].to(x.dtype)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = (torch._grouped_mm(rows, w.transpose(1, 2), offs=ends) for w in (self.w1, self.w3))
        out = torch._grouped_mm(F.silu(gate) * up, self.w2.transpose(1, 2), offs=ends)
        if self.how != "weighted before":
            out = (out.float() * top).to(x.dtype)
        if self.how == "put":
            back = torch.zeros_like(out)
            back[order] = out
            return back.view(-1, 2, 16).sum(1)
        if self.how == "taken":
            return out[torch.argsort(order)].view(-1, 2, 16).sum(1)
        if self.how == "added":
            return torch.zeros_like(x).index_add(0, tokens, out)
        return torch.zeros_like(x).scatter_add(0, index, out)


@pytest.mark.parametrize("how", ["weighted before", "scattered", "put", "taken", "added"])
def test_experts_that_sort_their_rows_are_routed(how: str) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 16), Sorted(how)).bfloat16()
    alone, x = deepcopy(made), torch.randn(32, 16).bfloat16()
    hints = sx.Hints(args=(x,), loss=lambda y: y.float().square().sum(), specs={"args.0": "ep, -", "1.w*": "ep, -, -"})
    pm = sx.parallelize(made, sx.Mesh(ep=2), hints, virtual=True)
    assert comm(pm, "dispatch") == 2 and "sort" not in str(pm.captured)
    loss = pm(x)
    loss.backward()
    expected = alone(x).float().square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    for name, each in alone.named_parameters():
        torch.testing.assert_close(
            pm.full_grads()[name], each.grad, rtol=0.05, atol=0.05 * float(each.grad.abs().max())
        )
    assert pm.verify()


def test_rows_that_broadcast_over_columns_stay_as_they_are() -> None:
    torch.manual_seed(0)
    made, x = Sorted("broadcast over columns").bfloat16(), torch.randn(8, 16).bfloat16()
    hints = sx.Hints(args=(x,), loss=lambda y: y.float().square().sum(), specs={"args.0": "dp, -"})
    pm = sx.parallelize(made, sx.Mesh(dp=2), hints, virtual=True)
    torch.testing.assert_close(pm(x), made(x).float().square().sum(), rtol=1e-2, atol=1e-2)


# ---- experts that are modules of their own ---------------------------------------------------------------------------

T5 = {"vocab_size": 48, "d_model": 16, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
T5 |= {"use_cache": False, "expert_capacity": 3, "pad_token_id": 1, "decoder_start_token_id": 1}
SWITCH = {"d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2, "dropout_rate": 0.0}
SWITCH |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0}
NLLB: dict[str, Any] = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
NLLB |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
NLLB |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24)
NLLB |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0)
NLLB |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "second_expert_policy": "all"}
LOOPED = {"SwitchTransformers": SWITCH, "NllbMoe": NLLB}
PAIRS = {"input_ids": IDS, "decoder_input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def looped(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with routers in the dtype of all else, whose classifiers convert themselves into theirs at each call."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**T5, **LOOPED[name])
    made: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(dtype).train()
    for each in made.modules():
        if hasattr(each, "expert_capacity"):
            each.dtype = dtype
    return made


def plan_looped(made: nn.Module, mesh: sx.Mesh, specs: Any, tokens: str, **more: Any) -> sx.ParallelModule:
    given = {"kwargs.*": tokens, "targets.0": tokens, **specs}
    hints = sx.Hints(kwargs=PAIRS, targets=(IDS,), loss=loss, specs=given, **more)
    return sx.parallelize(made, mesh, hints, virtual=True)


OWN_TP = {"**.experts.*.wi.weight": "tp ep, -", "**.experts.*.wo.weight": "ep, tp"}
OWN: dict[str, tuple[str, sx.Mesh, dict[str, Any], str, dict[str, Any]]] = {
    "ep": ("SwitchTransformers", sx.Mesh(ep=2), EP, "ep, -", {}),
    "ep of four": ("SwitchTransformers", sx.Mesh(ep=4), EP, "ep, -", {}),
    "dp, ep": ("SwitchTransformers", sx.Mesh(dp=2, ep=2), EP, "dp ep, -", {}),
    "ep, tp": ("SwitchTransformers", sx.Mesh(ep=2, tp=2), OWN_TP, "ep, -", {}),
    "tokens on all": ("SwitchTransformers", sx.Mesh(ep=2), EP, "-, -", {}),
    "by name": ("SwitchTransformers", sx.Mesh(ep=2), {"**.experts.*.*.weight": "ep, -"}, "ep, -", {}),
    "zero": ("SwitchTransformers", sx.Mesh(dp=2, ep=2), EP, "dp ep, -", {"zero": 3, "zero_min_numel": 1}),
    "NLLB, whose linear layers have biases": ("NllbMoe", sx.Mesh(ep=2), EP, "ep, -", {}),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:redundant compute")
@pytest.mark.parametrize("how", OWN)
def test_experts_that_are_modules_match_single_device(how: str) -> None:
    """Tokens beyond the capacity of their expert get zeros, as in eager."""
    name, mesh, specs, tokens, more = OWN[how]
    made = looped(name)
    alone = deepcopy(made)
    for each in alone.parameters():  # which those of experts without a token have here, and not in eager
        each.grad = torch.zeros_like(each)
    beyond = list[Tensor]()
    for each in alone.modules():
        if type(each).__name__ == "SwitchTransformersTop1Router":
            each.register_forward_hook(lambda _, given, out: beyond.append((out[0].sum(-1) == 0).any()))
    pm = plan_looped(made, mesh, specs, tokens, **more)
    check_step(pm, alone, loss, (), (IDS,), kwargs=PAIRS, bound=1e-12)
    assert name == "NllbMoe" or all(beyond)
    assert not any("planned" in each for each in pm.report().warnings)


@pytest.mark.long
def test_matrices_of_experts_that_are_modules_are_not_gathered() -> None:
    """A rank sends half of the half that it stores, and gets its experts: forward, and their gradients back."""
    pm = plan_looped(looped("SwitchTransformers"), sx.Mesh(ep=2), EP, "ep, -")
    sent = {row.kind: row.nbytes for row in pm.report().communication.rows}
    stored = 2 * 2 * 4 * 24 * 16 * 8 / 2
    assert sent.keys() == {"all-reduce", "all-to-all", "dispatch", "combine"}
    assert sent["all-to-all"] == pytest.approx(2 * stored / 2, rel=0.01)


def override(expert: Any) -> None:
    expert.forward = lambda hidden: 2 * expert.wo(expert.act(expert.wi(hidden)))


UNLIKE: dict[str, Callable[[Any], Any]] = {
    "another forward": override,
    "another mode": lambda expert: expert.eval(),
    "another dropout": lambda expert: setattr(expert.dropout, "p", 0.5),
    "another activation": lambda expert: setattr(expert.act, "slope", 2.0),
    "a hook": lambda expert: expert.wi.register_forward_hook(lambda *_: None),
}


@pytest.mark.long
@pytest.mark.parametrize("what", UNLIKE)
def test_experts_that_are_unlike_are_not_routed(what: str) -> None:
    made = looped("SwitchTransformers")
    UNLIKE[what](made.encoder.block[1].layer[1].mlp.experts["expert_1"])
    with pytest.raises(sx.Error, match="depend on the data"):
        plan_looped(made, sx.Mesh(dp=2), {}, "dp, -")


@pytest.mark.long
def test_an_expert_whose_mode_changes_later_is_another_specialization() -> None:
    made = looped("SwitchTransformers")
    pm = plan_looped(made, sx.Mesh(dp=2), {}, "dp, -")
    pm(IDS, **PAIRS)
    made.encoder.block[1].layer[1].mlp.experts["expert_1"].dropout.p = 0.5
    with pytest.raises(sx.Error, match=r"dropout.\]\.p == 0.0 fails"):
        pm(IDS, **PAIRS)


@pytest.mark.long
def test_routers_that_convert_themselves_change_no_weight() -> None:
    """In float32 as the models are, without a call before; converted in forward, an error says what to do before."""
    made = looped("SwitchTransformers", torch.float32)
    alone, specs = deepcopy(made), {"**.experts.*.wi.weight": "tp, -", "**.experts.*.wo.weight": "-, tp"}
    pm = plan_looped(made, sx.Mesh(dp=2, tp=2), specs, "dp, -")
    check_step(pm, alone, loss, (), (IDS,), kwargs=PAIRS, bound=1e-5)
    made.double()
    with pytest.raises(sx.Error, match="converts its own modules") as error:
        plan_looped(made, sx.Mesh(dp=2), {}, "dp, -")
    assert "router.classifier" in str(error.value) and "float32, which was of torch.float64" in str(error.value)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no room": (lambda: sx.Experts("ep", capacity=0), "experts without room for rows"),
    "no number": (lambda: sx.Experts("ep", capacity="much"), "experts without room for rows"),
    "no axis": (lambda: sx.Experts(""), "the axis of Experts is no name"),
    "an unknown axis": (lambda: plan(model("mixtral")[0], sx.Mesh(ep=2), {"**.experts": sx.Experts("dp")}), "unknown"),
    "no experts": (lambda: plan(model("mixtral")[0], sx.Mesh(ep=2), {"**.mlps": sx.Experts("ep")}), "names no experts"),
    "a number of experts": (lambda: plan(model("mixtral")[0], sx.Mesh(ep=3), EP, "-, -"), "a mesh with an axis of 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_experts_are_an_error(case: str) -> None:
    wrong, said = WRONG[case]
    with pytest.raises(sx.Error, match=said):
        wrong()


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"recompute": "model.layers.*"}])
def test_a_recorded_step_has_the_load_of_experts(more: dict[str, Any], tmp_path: Path) -> None:
    """Of those that eager code chose; recomputed ones count once."""
    made, alone = model("mixtral")
    chosen = dict[str, Tensor]()
    for path, module in alone.named_modules():
        if path.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args, path=path: chosen.update({path: args[1]}))
    alone(IDS)
    pm = plan(made, sx.Mesh(ep=2), EP, **more)
    assert "Load of experts" not in str(pm.report())
    with pm.record(tmp_path / "step.json") as recording:
        pm(IDS, IDS).backward()
    for path, ids in chosen.items():
        loads = recording.loads[path]
        assert [*loads[0].rows, *loads[1].rows] == ids.flatten().bincount(minlength=4).tolist()
        assert all(load.total <= load.room for load in loads.values())
    assert "Load of experts" in str(pm.report())
