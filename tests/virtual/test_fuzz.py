"""Random models, meshes, hints and passes equal one device, or are refused with an Error (see tests/fuzz)."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shardfx.compile
from tests.fuzz.case import Case, draw
from tests.fuzz.check import Outcome, check, sharing
from tests.fuzz.shrink import shrink
from tests.fuzz.template import PLUGINS

ALL, CHUNK = 200, 20
"""Of the 2,000 of ``make fuzz``, and at once."""
VERIFIED = 8
"""Of so many cases one is verified, too."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, CHUNK))
def test_random_cases_equal_one_device(first: int) -> None:
    with sharing() as captures:
        outcomes = {
            seed: check(draw(seed), captures, verify=seed % VERIFIED == 0) for seed in range(first, first + CHUNK)
        }
    failed = {seed: f"{o.kind}: {o.text}" for seed, o in outcomes.items() if o.result == "failed"}
    seeds = " ".join(map(str, failed))
    assert not failed, f"python -m tests.fuzz --shrink --only SEED, of {seeds}\n{next(iter(failed.values()))}"
    alarms = {seed: o.alarm for seed, o in outcomes.items() if o.alarm}
    assert not alarms, f"equal, and not verified: {alarms}"
    refused = [o.text for o in outcomes.values() if o.result == "refused"]
    assert len(refused) <= CHUNK // 3, f"most cases must be equal, not refused\n{refused[0]}"


WRONG_ONCE = [
    *(294, 384, 1975, 2356, 2680, 5296, 5461, 7388, 8388, 10588, 10611, 20064, 20254, 20748, 21138, 22441, 40176),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", WRONG_ONCE)
def test_cases_that_were_wrong_once(seed: int) -> None:
    """1975: the gradient of a batch norm in an unusual layout; 2356: a parameter that was stored sharded over
    iterations; 5461: a strided view of a weight in a gathered segment; 7388: stages that lay elsewhere in evaluation;
    8388: a view recomputed in a stage that comes later; 10588: updates in the stage of another weight; 10611: the price
    of an op in iterations; 20254, 20748, 21138: what divides rounding by rounding; 22441: rows that were moved behind a
    slice and of which a rank had none; the others: false alarms of the verifier.

    (Heads were not drawn in chunks then.)
    """
    case = draw(seed)
    specs = tuple((name, spec) for name, spec in case.specs if "chunk" not in spec)
    case = replace(case, specs=specs, staged=case.staged and replace(case.staged, chunk=0))
    with sharing() as captures:
        outcome = check(case, captures, verify=True)
    assert (outcome.result, outcome.alarm) == ("equal", "")


DAMAGE = '''@dataclass(frozen=True)
class Damage(sx.Pass):
    """What should be a tanh is none."""

    name: ClassVar[str] = "damage"

    def run(self, graph, context):
        for node in graph.nodes:
            if node.op is torch.ops.aten.tanh.default:
                node.op = torch.ops.aten.sigmoid.default
        return True


'''


def fails(outcome: Outcome) -> str:
    return outcome.kind if outcome.result == "failed" else ""


def damaged() -> Case:
    """A large case whose model has a tanh in it, with a pass that damages that."""
    layers = (
        ("layer_norm", (0,) * 8),
        ("linear", (2, 7, 1, 8, 2, 8, 1, 8)),
        ("stacked", (0,) * 8),
    )
    case = next(draw(seed) for seed in range(1000) if len(draw(seed).mesh) == 3)
    net = type(case.net)(0, 4, 8, 8, 12, layers, "mask", "pair", "cross_entropy", True, "train")
    specs = (("args.0", "a, -"), ("embed.weight", "b c, -"), ("l1.weight", "-, a b"))
    return type(case)(0, net, (2, 2, 2), specs, 25, ("identity", "damage"), False)


@pytest.mark.slow
def test_a_failure_shrinks_to_a_script_that_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLUGINS, "damage", ("Damage()", DAMAGE))
    with sharing() as captures:
        outcome = check(damaged(), captures)
        assert outcome.result == "failed" and outcome.kind.startswith("differs"), outcome
        small = shrink(damaged(), lambda case: fails(check(case, captures)))
    assert [kind for kind, _ in small.net.layers] == ["stacked"]
    assert (small.mesh, small.specs, small.passes) == ((2,), (), ("damage",)) or small.passes == ("identity", "damage")
    script = tmp_path / "small.py"
    script.write_text(small.script())
    imported = {line.split()[1].split(".")[0] for line in script.read_text().splitlines() if "import " in line}
    assert imported - sys.stdlib_module_names == {"torch", "shardfx"}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 1 and "DIFFERENT" in run.stdout, run.stdout + run.stderr


def test_what_is_shared_ends_with_its_context() -> None:
    log = logging.getLogger("shardfx")
    before = log.level, shardfx.compile.capture
    with pytest.raises(KeyError), sharing():
        raise KeyError
    assert (log.level, shardfx.compile.capture) == before
