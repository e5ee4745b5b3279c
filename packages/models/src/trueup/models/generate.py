"""``trueup generate``: continue one prompt, as text while it comes or as one JSON object."""
import argparse
import json
import sys
import time
from dataclasses import dataclass

from trueup.core.device import active_path
from trueup.core.sampling import SamplingParams
from trueup.models.completion import Completion
from trueup.models.drafters import DRAFT_TOKENS
from trueup.models.llm import LLM

HELP = "continue a prompt and report the speed"
MODEL = "glm-4.7-flash-nano"
PROMPT = "def read_lines(path):"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; '-' reads standard input")
    add_model_arguments(parser)
    add = parser.add_argument
    add("--max-tokens", type=int, default=64, metavar="N", help="most tokens to generate (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--seed", type=int, metavar="S", help="makes a text at a temperature above 0 repeatable")
    add("--json", action="store_true", help="print one JSON object instead of text")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command that loads a model takes."""
    parser.add_argument("--model", default=MODEL, metavar="NAME_OR_FOLDER",
                        help="a model of the zoo or a checkpoint folder (default: %(default)s)")
    parser.add_argument("--device", help="cpu, npu or npu:<index> (default: an NPU where one is)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, else as stored)")
    parser.add_argument("--spec", metavar="DRAFTER", help="propose several tokens a round: mtp, eagle3, ngram, or the "
                        "folder of an EAGLE-3 head (default: one token a round)")
    parser.add_argument("--draft-tokens", type=int, default=DRAFT_TOKENS, metavar="K",
                        help="most tokens proposed a round (default: %(default)s)")


def from_arguments(args: argparse.Namespace) -> LLM:
    """The model that the arguments of :func:`add_model_arguments` ask for."""
    return LLM.from_pretrained(args.model, args.device, args.dtype, spec=args.spec, draft_tokens=args.draft_tokens,
                               progress=sys.stderr.isatty())


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    llm = from_arguments(args)
    if prompt is None:
        prompt = PROMPT
        if not args.json:
            print(prompt, end="", file=sys.stderr, flush=True)
    completion = llm.start(prompt)
    timing = follow(llm, completion, params, echo=not args.json)
    if args.json:
        print(json.dumps(report(llm, completion, timing)))
    else:
        print(flush=True)
        print(f"{about(llm)}\n{timing}{drafting(llm)}", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class Timing:
    """Seconds until the first token, and from there to the last."""

    prompt_tokens: int
    decoded_tokens: int  # the first token comes out of the prompt's forward
    prefill_s: float
    decode_s: float

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float | None:
        return self.decoded_tokens / self.decode_s if self.decoded_tokens else None

    def __str__(self) -> str:
        prefill = f"prefill {self.prompt_tokens} tokens, {self.prefill_rate:,.0f} tokens/s"
        if self.decode_rate is None:
            return prefill
        return f"{prefill}; decode {self.decoded_tokens} tokens, {self.decode_rate:,.0f} tokens/s"


def follow(llm: LLM, completion: Completion, params: SamplingParams, echo: bool) -> Timing:
    """Run one completion to its end; with ``echo`` its text goes to stdout as it comes."""
    begin, first, shown = time.perf_counter(), 0.0, 0
    for _ in llm.rounds([completion], params):
        if completion.token_ids and not first:
            first = time.perf_counter()
        if echo:
            print(completion.text[shown:], end="", flush=True)
            shown = len(completion.text)
    end = time.perf_counter()
    return Timing(completion.prompt_tokens, len(completion.token_ids) - 1, first - begin, end - first)


def report(llm: LLM, completion: Completion, timing: Timing) -> dict:
    """The --json object."""
    path, spec = active_path(), llm.model.cache_spec
    return {
        "model": llm.name,
        "device": str(spec.device),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "operators": {"path": path.name, "reason": path.reason},
        "prompt": completion.prompt,
        "prompt_tokens": completion.prompt_tokens,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prefill_seconds": timing.prefill_s,
        "decode_seconds": timing.decode_s,
        "prefill_tokens_per_second": timing.prefill_rate,
        "decode_tokens_per_second": timing.decode_rate,
        "acceptance": {
            "tokens_per_round": a.tokens_per_round, "rate": a.rate, "by_depth": a.by_depth, "rounds": a.rows,
        } if (a := llm.acceptance).rows else None,
    }


def drafting(llm: LLM) -> str:
    """'; 3.08 tokens a round, 69% of drafts kept', or nothing where nothing was drafted."""
    a = llm.acceptance
    return f"; {a.tokens_per_round:.2f} tokens a round, {a.rate:.0%} of drafts kept" if a.rows else ""


def about(llm: LLM) -> str:
    """'glm-4.7-flash-nano, float32 on cpu, operators: own'."""
    spec = llm.model.cache_spec
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"{llm.name}, {dtype} on {spec.device}, operators: {active_path().name}"
