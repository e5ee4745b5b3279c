"""``trueup generate`` and ``trueup demo`` as a user meets them."""
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trueup.core.cli import main
from trueup.core.sampling import SamplingParams
from trueup.models import LLM, generate

PROMPT = "def add(a, b):\n    "
TRUEUP = str(Path(sys.executable).with_name("trueup"))


@pytest.fixture(scope="module")
def llm():
    return LLM.from_pretrained(generate.MODEL, progress=False)


def trueup(*arguments):
    return subprocess.run([TRUEUP, *arguments], capture_output=True, text=True, timeout=60)


def test_stdout_is_the_text_and_stderr_the_speed(llm):
    ran = trueup("generate", PROMPT, "--max-tokens", "20")
    completion = llm.generate(PROMPT, SamplingParams(max_tokens=20))[0]
    assert ran.returncode == 0 and ran.stdout == completion.text + "\n"
    about, speed = ran.stderr.splitlines()
    assert about.startswith("glm-4.7-flash-nano, float32 on cpu, operators: ")
    assert speed.startswith(f"prefill {completion.prompt_tokens} tokens, ") and speed.endswith(" tokens/s")


def test_json_is_one_object_with_everything(llm, capsys):
    arguments = ["--json", "--max-tokens", "12", "--temperature", "1.0", "--seed", "3"]
    assert main(["generate", PROMPT, *arguments]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    completion = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=3))[0]
    assert err == "" and (report["text"], report["token_ids"]) == (completion.text, completion.token_ids)
    assert report["prompt"] == PROMPT and report["prompt_tokens"] == completion.prompt_tokens
    assert report["finish_reason"] == completion.finish_reason and report["model"] == generate.MODEL
    assert report["operators"]["path"] in ("own", "hostnpu", "device") and report["operators"]["reason"]
    assert report["prefill_tokens_per_second"] > 0 and report["decode_tokens_per_second"] > 0


def test_one_token_has_no_decode_speed(capsys):
    assert main(["generate", PROMPT, "--json", "--max-tokens", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["token_ids"]) == 1 and report["decode_tokens_per_second"] is None


def test_a_dash_reads_the_prompt_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(["generate", "-", "--max-tokens", "5"]) == 0
    from_stdin = capsys.readouterr().out
    assert main(["generate", PROMPT, "--max-tokens", "5"]) == 0
    assert from_stdin == capsys.readouterr().out


def test_without_a_prompt_the_default_is_shown_and_continued(capsys):
    assert main(["generate", "--max-tokens", "5"]) == 0
    without = capsys.readouterr()
    assert main(["generate", generate.PROMPT, "--max-tokens", "5"]) == 0
    assert without.out == capsys.readouterr().out and without.err.startswith(generate.PROMPT)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([""], "the prompt is empty; give at least one token"),
        (["x", "--temperature", "-1"], "temperature is -1.0; expected 0 (greedy) or a positive number"),
        (["x", "--temperature", "nan"], "temperature is nan; expected 0 (greedy) or a positive number"),
        (["x", "--max-tokens", "0"], "max_tokens is 0; expected at least 1"),
        (["x", "--max-tokens", "2048"], "1 prompt tokens and max_tokens=2048 need 2049 positions; the model has 2048"),
        (["x", "--model", "nope"], "no embedded model 'nope'; there are "),
        (["x", "--device", "gpu"], "device 'gpu' is unknown; expected "),
        (["x", "--dtype", "int8"], "dtype 'int8' is unknown; expected one of "),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"trueup: {message}") and err.count("\n") == 1


def test_a_broken_config_is_named_and_nothing_else_reaches_stderr(tmp_path):
    (tmp_path / "config.json").write_text("{")
    ran = trueup("generate", "x", "--model", str(tmp_path))
    assert ran.returncode == 2 and ran.stdout == "" and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith(f"trueup: {tmp_path}/config.json: not valid JSON")


def test_the_demo_fits_a_terminal_and_returns_its_pages(capsys):
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines())) <= 80
    assert "3 requests decode, padded to 4" in out and "3 of 128 held while running, 0 afterwards" in out
    assert "npu_fused_infer_attention_score_v2" in out and "6 million parameters" in out
