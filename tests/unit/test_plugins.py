"""Plugins: the packages that the docs show work as they stand there; mistakes in others are named with the package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardfx as sx
from shardfx import plugins
from shardfx.cli import main
from shardfx.ir import OutputKind, Rewriter, parse_graph, parse_program, print_graph, row_of, validate_graph
from shardfx.ir.program.lower import lower
from shardfx.ir.registry import PROGRAM_OPS
from tests.plugin import fake_distribution, install, write_package

MODULES = ("late_passes", "row_ops", "broken_plugin", "test_late_passes", "test_row_ops", "test_row_rules")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed both packages of the docs; their tests lie beside, in ``tests``."""
    folder = tmp_path_factory.mktemp("plugins")
    pages = {"passes": "writing_passes.md", "rules": "writing_rules.md"}
    packages = [write_package(page, folder / name) for name, page in pages.items()]
    install(folder / "site", *packages)
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of installed packages, on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.refresh()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        del sys.modules[name]
    plugins.refresh()


@pytest.mark.long
def test_the_packages_of_the_docs_pass_their_own_tests(installed: Path) -> None:
    """In a process of its own, for ops can be defined only once."""
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    path = os.pathsep.join([str(installed / "site"), str(Path(sx.__file__).parents[1])])
    tests = [str(path) for path in sorted(installed.glob("*/test_*.py"))]
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", str(installed), "-c", os.devnull]
    run = subprocess.run(
        [sys.executable, "-c", code, *options, *tests],
        env={**os.environ, "PYTHONPATH": path},
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "10 passed" in run.stdout


@pytest.mark.long
def test_the_command_line_lists_installed_passes(
    installed: Path, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(installed / "site"))
    plugins.refresh()
    assert main(["passes"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "mb: float = 1.0" in rows["count-large"] and "shardfx-late-passes" in rows["count-large"]
    assert "COMM_EXPLICIT" in rows["narrow-reductions"]
    assert "built-in" in rows["propagate"]
    (made,) = plugins.as_passes(["count-large{mb=2}"])
    assert (type(made).__module__, str(made)) == ("late_passes.count_large", "count-large{mb=2.0}")


# ---- mistakes


BROKEN = {
    "import": ("import not_there", "cannot be imported"),
    "no pass": ("Broken = 3", "is not a pass"),
    "name": ("from shardfx.passes import BucketComm as Broken", "is called otherwise than its entry point"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_pass_names_its_distribution(site: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, what = BROKEN[case]
    fake_distribution(site, "shardfx-broken", {plugins.PASSES: {"broken": "broken_plugin:Broken"}}, broken_plugin=text)
    plugins.refresh()
    with pytest.raises(sx.Error) as caught:
        plugins.find_pass("broken")
    assert what in caught.value.what and "shardfx-broken 1.0" in caught.value.what
    # The others are listed all the same.
    assert main(["passes"]) == 2
    listed = capsys.readouterr()
    assert "bucket-comm" in listed.out and "see below" in listed.out
    assert what in listed.err
    assert plugins.find_pass("bucket-comm").name == "bucket-comm"


BROKEN_RULES = {
    "no rules": ("RULES = [1, 2]", "is not a set of rules"),
    "failing": ("def RULES(): return 1 / 0", "fails when it is called"),
}


@pytest.mark.parametrize("case", BROKEN_RULES)
def test_broken_rules_name_their_distribution(site: Path, case: str) -> None:
    text, what = BROKEN_RULES[case]
    fake_distribution(site, "shardfx-broken", {plugins.RULES: {"broken": "broken_plugin:RULES"}}, broken_plugin=text)
    plugins.refresh()
    with pytest.raises(sx.Error, match=what) as caught:
        plugins.all_rules()
    assert "shardfx-broken 1.0" in caught.value.what


ROWS = """
import torch
from shardfx.ir.ops.table import Keyword, LocalOp, OwnOp

def doubled(x):
    return x + x

def place(source, shape, mesh, **keywords):
    return source

def local(emit):
    return [emit.call(doubled, emit.args[0], gives=emit.shape(emit.node.outs[0], emit.node.outs[0].spec))]

OPS = (
    OwnOp("mylib.tag", {"note": Keyword("word")}, place, local),
    LocalOp("mylib.doubled", doubled, plain=lambda args, kwargs: (torch.ops.aten.mul.Tensor, (args[0], 2), {})),
)
"""
GRAPH = """mesh dp=2
established COMM_EXPLICIT, SHARDED
argument %x : f32[4{dp}]
forward:
  %0 = mylib.tag(%x, note=hello) : f32[4{dp}]  # 8 B
outputs:
  result results.0 = %0 : [4{dp}]"""


def test_an_op_of_a_plugin_is_parsed_printed_and_lowered_as_our_own_are(site: Path) -> None:
    fake_distribution(site, "shardfx-rows", {plugins.OPS: {"mylib": "broken_plugin:OPS"}}, broken_plugin=ROWS)
    plugins.refresh()
    rules = plugins.all_rules()
    graph = parse_graph(GRAPH)
    assert print_graph(graph) == GRAPH
    validate_graph(graph, rules=rules)
    program = lower(graph, 1, rules, {OutputKind.RESULT})
    assert "mylib.doubled(%x)" in str(program)
    assert str(parse_program(str(program), graph)) == str(program)
    assert row_of(PROGRAM_OPS["mylib.doubled"].function) is PROGRAM_OPS["mylib.doubled"]
    node = Rewriter(graph, rules).comm("mylib.tag", graph.inputs[0].value, note="again")
    assert node.outs[0].spec == graph.inputs[0].value.spec
    (site / "shardfx_rows-1.0.dist-info" / "entry_points.txt").unlink()
    plugins.refresh()
    with pytest.raises(sx.Error, match="cannot be read"):
        parse_graph(GRAPH)


def test_two_ops_of_one_name_are_an_error(site: Path) -> None:
    text = ROWS.replace("mylib.tag", "comm.all_reduce")
    fake_distribution(site, "shardfx-rows", {plugins.OPS: {"mylib": "broken_plugin:OPS"}}, broken_plugin=text)
    plugins.refresh()
    with pytest.raises(sx.Error, match=r"two ops are called 'comm\.all_reduce'") as caught:
        plugins.all_rules()
    assert "shardfx-rows 1.0" in caught.value.what


def test_an_unknown_pass_is_told_what_comes_near() -> None:
    with pytest.raises(sx.Error, match="unknown pass 'fuse-com'") as caught:
        plugins.as_passes(["fuse-com{mb=2}"])
    assert caught.value.remedy == "did you mean 'bucket-comm'?"
