"""``trueup doctor acceptance``: every fault that it knows is found where it was planted, and leaves the text right."""
import json

import pytest

from trueup.core.cli import main
from trueup.models.acceptance import command, measure
from trueup.models.acceptance.faults import FAULTS
from trueup.models.drafters import make_drafter
from trueup.models.llm import LLM

NAME = "glm-4.7-flash-nano"
SPECS = ("mtp", "eagle3")


@pytest.fixture(scope="module")
def llm():
    return LLM.from_pretrained(NAME, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def prompts(llm):
    return [llm.tokenizer.encode(text)[:60] for text in command.default_prompts()[:4]]


@pytest.fixture(scope="module", params=SPECS)
def healthy(request, llm, prompts):
    """(spec, its run with nothing planted)."""
    return request.param, measure.run(llm.model, request.param, 3, prompts, 24, record=True)


def test_nothing_is_wrong_with_a_drafter_as_it_is(healthy):
    _, run = healthy
    assert run.acceptance.tokens_per_round > 1.8
    assert all(c.ok and c.seen for c in run.checks)
    assert {c.input for c in run.checks} >= {"tokens", "positions", "lengths", "hidden", "feedback", "carried", "layer",
                                             "cache"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_each_planted_fault_is_found_where_it_sits(llm, prompts, healthy, fault):
    spec, right = healthy
    if not fault.fits(make_drafter(spec, llm.model, 3)):
        pytest.skip(f"{spec} cannot have it")
    run = measure.run(llm.model, spec, 3, prompts, 24, fault, record=True)
    wrong = {c.input for c in run.checks if not c.ok}
    assert fault.input in wrong
    assert run.text == right.text  # verification repairs it: only acceptance shows
    again = measure.run(llm.model, spec, 3, prompts, 24, record=True)
    assert all(c.ok for c in again.checks)  # it was planted in a copy


def test_what_stands_before_the_norm_is_recognised(llm, prompts):
    fault = next(f for f in FAULTS if f.name == "hidden before the norm")
    run = measure.run(llm.model, "mtp", 3, prompts, 24, fault, record=True)
    (hidden,) = [c for c in run.checks if c.input == "hidden"]
    assert hidden.instead == "the hidden state before the final norm"


def doctor(capsys, *args):
    code = main(["doctor", "acceptance", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def read(path):\n    with open(path) as f:\nclass Reader:\n")
    code, out, _ = doctor(capsys, "--prompts", str(file), "--json")
    report = json.loads(out)
    assert code == 0 and report["prompts"] == 3 and all(c["ok"] for c in report["inputs"])
    assert report["signatures"][0]["name"] == "this run" and report["signatures"][0]["distance"] == 0
    lost = next(s for s in report["signatures"] if s["name"] == "not fed back")
    shares = ",".join(f"{x:.3f}" for x in lost["by_depth"])
    code, out, _ = doctor(capsys, "--prompts", str(file), "--measured", shares)
    assert code == 0 and "resembles 'not fed back'" in " ".join(out.split())
    code, out, _ = doctor(capsys, "--prompts", str(file), "--spec", "ngram")
    assert code == 0 and "no model" in out


def test_a_plot_is_written(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "prompts.txt"
    file.write_text("def read(path):\n")
    assert doctor(capsys, "--prompts", str(file), "--speed", "--plot", str(tmp_path / "a.svg"))[0] == 0
    assert "times plain decoding" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 5000


@pytest.mark.parametrize(("args", "message"), [
    (("--measured", "0.5,x"), "expected shares from 0 to 1"),
    (("--spec", "medusa"), "spec 'medusa' is unknown; expected one of mtp, eagle3, ngram"),
    (("--draft-tokens", "0"), "draft_tokens is 0; expected 1 to 15"),
])
def test_mistakes_end_in_one_line(capsys, args, message):
    code, _, err = doctor(capsys, *args)
    assert code == 2 and message in err
