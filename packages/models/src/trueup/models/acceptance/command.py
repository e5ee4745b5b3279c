"""``trueup doctor acceptance``: how many drafts are kept, what the drafter gets, and which fault that resembles."""
import argparse
import json
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trueup.core.speculation.chain import ChainDrafter
from trueup.models.acceptance import faults, measure
from trueup.models.acceptance.clock import speed
from trueup.models.generate import add_model_arguments, from_arguments

HELP = "why is my acceptance low: a drafter's inputs, and known faults to compare with"
NEW_TOKENS = 40
ALIKE = 0.1  # root mean square difference of two acceptances by depth that are taken for the same


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.set_defaults(spec="mtp")
    add = parser.add_argument
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line (default: functions of Python's own library)")
    add("--measured", metavar="A,B,C", help="acceptance by depth that another engine reports for this model and "
        "drafter: compare that instead of this run")
    add("--speed", action="store_true", help="measure the speed with and without drafts, too")
    add("--plot", type=Path, metavar="FILE", help="write acceptance by depth as a picture (png, svg); needs matplotlib")
    add("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    report = examine(args)
    if args.plot:
        from trueup.models.acceptance.plot import plot

        plot(report, args.plot)
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """The report as plain data."""
    measured = _numbers(args.measured) if args.measured else None
    llm = from_arguments(args)
    texts = args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else default_prompts()
    prompts = [ids[:96] for text in texts if (ids := llm.tokenizer.encode(text))]
    if not prompts:
        raise ValueError(f"{args.prompts}: no prompt in it; expected one a line")
    model, spec, k = llm.model, args.spec, args.draft_tokens
    healthy = measure.run(model, spec, k, prompts, NEW_TOKENS, record=True)
    a = healthy.acceptance
    found = measured or a.by_depth
    drafter = llm.engine.drafter
    planted = [f for f in faults.FAULTS if isinstance(drafter, ChainDrafter) and f.fits(drafter)]
    rows: list[tuple[str, str, str | None, list[float]]] = [("this run", "nothing planted", None, a.by_depth)]
    rows += [(f.name, f.says, f.case, measure.run(model, spec, k, prompts, NEW_TOKENS, f).acceptance.by_depth)
             for f in planted]
    signatures = [{"name": n, "says": s, "case": c, "by_depth": d, "distance": measure.distance(found, d)}
                  for n, s, c, d in rows]
    return {
        "model": llm.name, "spec": str(spec), "draft_tokens": k, "prompts": len(prompts), "measured": measured,
        "tokens_per_round": a.tokens_per_round, "rounds": a.rows, "by_depth": a.by_depth, "conditional": a.conditional,
        "inputs": [asdict(c) | {"ok": c.ok} for c in healthy.checks], "signatures": signatures,
        "speed": asdict(speed(model, spec, k, prompts[:8], NEW_TOKENS)) if args.speed else None,
    }


def default_prompts() -> list[str]:
    """Beginnings of functions from modules that every Python has."""
    import argparse as a
    import inspect
    import json.decoder
    import logging
    import shutil as s
    import textwrap as t
    import zipfile

    functions = (a.HelpFormatter.add_usage, a.ArgumentParser.parse_known_args, json.decoder.JSONDecoder.raw_decode,
                 logging.Logger.findCaller, s.copytree, t.TextWrapper.wrap, zipfile.ZipFile.open, inspect.getsourcefile)
    return [inspect.getsource(f) for f in functions]


def render(report: dict[str, Any]) -> str:
    """The report as text, wrapped to the terminal."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = [f"{report['model']}, {report['spec']}, {report['draft_tokens']} drafts, {report['prompts']} prompts: "
             f"{report['tokens_per_round']:.2f} tokens a round over {report['rounds']} verifications",
             f"acceptance by depth  {_shares(report['by_depth'])}"]
    if report["measured"]:
        lines.append(f"measured elsewhere   {_shares(report['measured'])}")
    if report["inputs"]:
        lines += ["", "What the drafter gets"]
        for c in report["inputs"]:
            state = "right" if c["ok"] else f"WRONG in {c['wrong']}"
            text = c["expected"] + (f"; found: {c['instead']}" if c["instead"] else "")
            lines.append(_wrap(f"  {c['input']:<11}{state:>13} of {c['seen']:<6}", text, width))
    if len(report["signatures"]) > 1:
        lines += ["", "What it resembles, nearest first"]
        for s in sorted(report["signatures"], key=lambda s: s["distance"]):
            case = f" ({s['case']})" if s["case"] else ""
            head = f"  {s['distance']:.2f}  {_shares(s['by_depth'])}  {s['name']:<30}"
            lines.append(_wrap(head, s["says"] + case, width))
    if sp := report["speed"]:
        lines += ["", f"speed at batch 1: {sp['achieved']:.2f} times plain decoding; the forwards alone would give "
                  f"{sp['expected']:.2f}", "milliseconds a forward: " + ", ".join(
                      f"{name} {sp[name]:.2f}" for name in ("plain", "verify", "draft", "learn"))]
    return "\n".join([*lines, "", _wrap("", verdict(report), width)])


def verdict(report: dict[str, Any]) -> str:
    """One sentence: what to look at first."""
    wrong = [c["input"] for c in report["inputs"] if not c["ok"]]
    if wrong:
        return f"The drafter does not get what it should: {', '.join(wrong)}."
    if not report["inputs"]:
        return "This drafter has no model: its acceptance depends on how often the text repeats itself."
    nearest = min(report["signatures"], key=lambda s: s["distance"])
    if not report["measured"]:
        return "The drafter gets what it should; if acceptance is low, it is the draft model's own."
    if nearest["distance"] > ALIKE:
        return (f"The measured acceptance resembles none of these; nearest is '{nearest['name']}', "
                f"{nearest['distance']:.2f} away.")
    if nearest["name"] == "this run":
        return "The measured acceptance is that of a drafter without a fault."
    return (f"The measured acceptance resembles '{nearest['name']}': {nearest['says']}. Check there first; faults with "
            "like signatures stand next in the list.")


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= n <= 1 for n in numbers):
        raise ValueError(f"--measured is {text!r}; expected shares from 0 to 1, such as 0.61,0.40,0.22")
    return numbers


def _shares(values: list[float]) -> str:
    return " ".join(f"{v:.2f}" for v in values)


def _wrap(head: str, text: str, width: int) -> str:
    return textwrap.fill(head + text, width, subsequent_indent=" " * len(head), break_on_hyphens=False)
