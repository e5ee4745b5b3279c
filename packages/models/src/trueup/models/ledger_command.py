"""``trueup ledger``: every operator call of one round, with named axes, real and padded sizes."""
import argparse
import json
from pathlib import Path

from trueup.core.ledger import Diff, Ledger, Trail, record
from trueup.core.sampling import SamplingParams
from trueup.models.demo import TOGETHER
from trueup.models.generate import add_model_arguments, from_arguments
from trueup.models.llm import LLM

HELP = "list every operator call of one round, with its shapes"
DECODE_ROUND = 2  # the first that decodes, where the prompts fit into one round

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>trueup ledger</title>
<style>
:root {{ color-scheme: light dark; font-family: system-ui, sans-serif; }}
table {{ border-collapse: collapse; margin-bottom: 2rem; }}
th, td {{ border: 1px solid #8888; padding: 0.2rem 0.5rem; text-align: left; vertical-align: top; }}
.call th {{ padding-top: 0.8rem; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="texts that run in one batch (default: the three of trueup demo)")
    add_model_arguments(parser)
    add("--round", type=int, default=DECODE_ROUND, metavar="N", help="which round, from 1 (default: %(default)s)")
    add("--layer", type=int, metavar="L", help="only calls of this layer, from 0")
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--diff", type=int, metavar="M", help="what is different in round M")
    show.add_argument("--follow", type=int, metavar="I", help="the last token of prompt I (from 1) through the round")
    out = parser.add_mutually_exclusive_group()
    out.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of text")
    out.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    shown = look(args)
    if args.json:
        print(json.dumps(shown.data()))
    elif args.html:
        args.html.write_text(PAGE.format(body=shown._repr_html_()), encoding="utf-8")
    else:
        print(shown.text())
    return 0


def look(args: argparse.Namespace) -> Ledger | Diff | Trail:
    """What the arguments ask to see."""
    wanted = {args.round} if args.diff is None else {args.round, args.diff}
    if min(wanted) < 1:
        raise ValueError(f"round {min(wanted)} was asked for; rounds count from 1")
    recorded = rounds(from_arguments(args), args.prompts or TOGETHER, wanted)
    owner = "" if args.layer is None else f"layers.{args.layer}"
    chosen = recorded[args.round].only(owner)
    if not chosen.calls:
        owners = [call.owner.split(".") for call in recorded[args.round].calls]
        layers = sorted({int(owner[1]) for owner in owners if owner[0] == "layers"})
        raise ValueError(f"no call was made in layer {args.layer}; the model has layers {layers[0]} to {layers[-1]}")
    if args.diff is not None:
        return chosen.diff(recorded[args.diff].only(owner))
    if args.follow is not None:
        layout = chosen.rounds[0].layout
        assert layout is not None, "a round of an engine has a layout"
        return chosen.follow(args.follow, len(layout.token_rows.get(args.follow, (0,))) - 1)
    return chosen


def rounds(llm: LLM, prompts: list[str] | tuple[str, ...], wanted: set[int]) -> dict[int, Ledger]:
    """Run the prompts together until the last wanted round; the ledger of each, one step.

    Requests are numbered from 1 in the order of ``prompts``, if ``llm`` has run nothing before.

    Raises:
        ValueError: an empty prompt, or more rounds than the model has positions for.
    """
    most = 1 + getattr(llm.engine.drafter, "draft_tokens", 0)  # tokens that a round gives a request
    params = SamplingParams(max_tokens=most * max(wanted), ignore_eos=True)
    for prompt in prompts:
        llm.engine.add(llm.tokenizer.encode(prompt), params)
    found = {}
    for number in range(1, max(wanted) + 1):
        if number in wanted:
            with record(llm.engine) as found[number]:
                llm.engine.step()
        else:
            llm.engine.step()
    return found

