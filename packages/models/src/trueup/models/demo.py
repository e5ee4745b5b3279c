"""``trueup demo``: a minute's look at the machinery on the model that comes with the package."""
import argparse
import textwrap
from collections import Counter
from typing import cast

from torch import nn

from trueup.core.device import active_path
from trueup.core.ledger import record
from trueup.core.round import Round
from trueup.core.sampling import SamplingParams
from trueup.models.generate import MODEL, about, follow
from trueup.models.llm import LLM

HELP = "show a model at work: text, batches, pages, operator calls"
ALONE = "def read_lines(path):"
TOGETHER = ("class Stack:\n    def __init__(self", "import os\nimport sys\n\ndef main(", "for name in sorted(")
PARAMS = SamplingParams(max_tokens=40, temperature=0.6, seed=5, ignore_eos=True)
WIDTH, INDENT = 78, 13


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the texts and what is said of them belong to one model."""


def run(args: argparse.Namespace) -> int:
    llm = LLM.from_pretrained(MODEL, progress=False)
    introduce(llm)
    one_prompt(llm)
    three_prompts(llm)
    conclude(llm)
    return 0


def introduce(llm: LLM) -> None:
    pages, spec = llm.engine.pages, llm.model.cache_spec
    mib = pages.num_pages * pages.page_size * spec.bytes_per_token / 2**20
    path = active_path()
    _row("model", about(llm).split(", operators")[0] + f", {_parameters(llm):,} parameters")
    _row("operators", f"{path.name}: {path.reason}")
    _row("cache", f"{pages.num_pages - 1} pages of {pages.page_size} tokens, a dummy page for padding; {mib:.0f} MiB")


def one_prompt(llm: LLM) -> None:
    _title("One prompt, as its tokens come")
    print(ALONE, end="", flush=True)
    timing = follow(llm, llm.start(ALONE), PARAMS, echo=True)
    print(f"\n\n[{timing}]")


def three_prompts(llm: LLM) -> None:
    _title("Three prompts in one batch")
    completions = [llm.start(prompt) for prompt in TOGETHER]
    rounds: list[Round] = []
    least_free = llm.engine.pages.free
    with record(llm) as ledger:
        for done in llm.rounds(completions, PARAMS):
            rounds.append(done)
            least_free = min(least_free, llm.engine.pages.free)
    for completion in completions:
        print(textwrap.indent(f"{completion.prompt}{completion.text}", "| ", lambda line: True), end="\n\n")
    prompts, decoding = rounds[0].layout, rounds[-1].layout.segments[0]
    have = llm.engine.config.num_pages - 1
    _row("round 1", f"{prompts.real_requests} prompts, {prompts.real_tokens} token rows in one forward")
    _row(f"rounds 2-{len(rounds)}", f"{decoding.real_requests} requests decode, padded to {decoding.padded_requests}: "
         "the fourth is an ordinary request on the dummy page")
    _row("pages", f"{have - least_free} of {have} held while running, {have - llm.engine.pages.free} afterwards")
    _row("kernels", f"{len(ledger.calls):,} calls of torch.ops.npu:")
    for name, count in Counter(call.operator for call in ledger.calls).most_common():
        print(f"{count:>{INDENT + 5},}  {name}")


def conclude(llm: LLM) -> None:
    _title("What this is")
    who = "torch_npu's own kernels ran." if active_path().name == "device" else (
        "each call was checked against the operator's contract before a reference kernel answered it on this CPU. "
        "On an Ascend NPU the same calls run torch_npu's kernels.")
    print(textwrap.fill(
        f"The text is that of a model with {_parameters(llm) / 1e6:.0f} million parameters, trained on a CPU from the "
        "Python standard library's source: it looks like Python and means little. The point is the machinery: every "
        f"kernel call above was torch.ops.npu.*, and {who}", WIDTH))


def _parameters(llm: LLM) -> int:
    return sum(parameter.numel() for parameter in cast(nn.Module, llm.model).parameters())


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def _row(name: str, text: str) -> None:
    text = textwrap.fill(f"{name:<{INDENT}}{text}", WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False)
    print(text, flush=True)
