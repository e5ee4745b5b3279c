"""``trueup doctor``: what is installed here, who answers the operators, and what does not fit together.

``trueup doctor <topic>`` looks at one thing closely; topics are entry points of the group ``trueup.doctor``, modules
with the members of :class:`trueup.core.cli.Command`.
"""
import argparse
import functools
import json
import os
import platform
import shutil
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from trueup.core import hostnpu
from trueup.core.device import device_nodes
from trueup.core.ops.load import load, schema_differences
from trueup.core.ops.registry import schemas

HELP = "show versions and what does not fit together"
TOPICS = "trueup.doctor"
PACKAGES = ("trueup-core", "trueup-models", "trueup-server")
ABSENT = "not found"
ASCEND = Path("/usr/local/Ascend")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    topics = parser.add_subparsers(title="topics", metavar="[topic]")
    for point in sorted(entry_points(group=TOPICS), key=lambda point: point.name):
        try:
            topic = point.load()
        except Exception as error:  # a broken installation is what this command is asked about
            broken = topics.add_parser(point.name, help=f"cannot be loaded: {error}")
            broken.set_defaults(run=functools.partial(_not_loaded, point.name, error))
            continue
        inner = topics.add_parser(point.name, help=topic.HELP, description=topic.HELP)
        topic.add_arguments(inner)
        inner.set_defaults(run=topic.run)


def _not_loaded(topic: str, error: Exception, args: argparse.Namespace) -> int:
    raise ValueError(f"the topic {topic!r} cannot be loaded: {error}; `trueup doctor` says what is installed")


def run(args: argparse.Namespace) -> int:
    """Print the report.  Always 0: advice is not failure."""
    report = examine()
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def examine() -> dict[str, Any]:
    """Everything the report says, as plain data.

    ``path.name`` is None where no operator path works here; ``path.reason`` then says why.
    """
    path: dict[str, str | None]
    differences: dict[str, Any] = {}
    try:
        active = load()
        path = {"name": active.name, "reason": active.reason}
        differences = schema_differences()
    except Exception as error:  # a broken torch_npu raises anything, and then this report is needed most
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        path = {"name": None, "reason": f"{kind}{error}"}
    report = {
        "python": f"{platform.python_version()}, {sys.executable}",
        "os": platform.platform(),
        "torch": torch.__version__,
        "torch_build": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
        "torch_npu": hostnpu.installed("torch_npu"),
        "driver": _first_version([ASCEND / "driver/version.info"]),
        "cann": _cann(),
        "npus": len(device_nodes()),
        "soc": torch.get_device_module("npu").get_device_name(0) if path["name"] == "device" else None,
        "packages": {name: v for name in PACKAGES if (v := hostnpu.installed(name))},
        "path": path,
        "schemas": {
            "count": len(schemas()),
            "differences": {name: {"ours": ours, "installed": theirs} for name, (ours, theirs) in differences.items()},
        },
    }
    return report | {"advice": advise(report)}


def render(report: dict[str, Any]) -> str:
    """The report as aligned text, wrapped to the terminal."""
    path, found = report["path"], report["schemas"]
    wrong = len(found["differences"])
    if report["torch_npu"] is None or path["name"] is None:
        schema_line = f"{found['count']} operators, as in torch_npu 2.13.0"
    else:
        schema_line = f"{found['count'] - wrong} of {found['count']} operators as in the installed torch_npu"
    rows = {
        "Python": report["python"],
        "OS": report["os"],
        "torch": f"{report['torch']}, {report['torch_build']} build",
        "torch_npu": report["torch_npu"] or "not installed",
        "driver": report["driver"] or ABSENT,
        "CANN": report["cann"] or ABSENT,
        "NPUs": f"{report['npus'] or 'no'} device files",
        "SoC": report["soc"] or "unknown without a driver",
        "packages": ", ".join(f"{name} {version}" for name, version in report["packages"].items()),
        "operator path": f"{path['name'] or 'none'}: {path['reason']}",
        "schemas": schema_line,
    }
    width = min(shutil.get_terminal_size().columns, 110)
    lines = [_wrap(f"{label:<15}", value, width) for label, value in rows.items()]
    advice = [_wrap("- ", text, width) for text in report["advice"]]
    return "\n".join([*lines, "", *(["Advice", *advice] if advice else ["Nothing to advise."])])


def _wrap(head: str, text: str, width: int) -> str:
    return textwrap.fill(head + text, width, subsequent_indent=" " * len(head), break_on_hyphens=False)


def advise(report: dict[str, Any]) -> list[str]:
    """What in ``report`` does not fit together, and what to do about it; empty where all is well."""
    advice = []
    path, npu, driver = report["path"]["name"], report["torch_npu"], hostnpu.driver_present()
    minor = ".".join(report["torch"].split("+")[0].split(".")[:2])
    if path is None:
        advice.append(report["path"]["reason"])
    if path == "hostnpu":
        advice.append("No NPU is in use: the operators run on the CPU, so neither speed nor device numerics show here.")
    if npu and report["npus"] and not driver:
        advice.append(f"This machine has an NPU, but {hostnpu.DRIVER} cannot be loaded: source CANN's set_env.sh.")
    if path == "hostnpu" and driver:
        advice.append("CANN is installed but sees no NPU: check ASCEND_RT_VISIBLE_DEVICES and the container's devices.")
    if npu is None and report["npus"]:
        advice.append(f"This machine has an NPU, but torch_npu is not installed: pip install 'torch_npu=={minor}.*'.")
    for name, schema in report["schemas"]["differences"].items():
        advice.append(
            f"{name}: the installed torch_npu has {schema['installed'] or 'no such operator'}; "
            f"trueup was written for {schema['ours']}."
        )
    if torch.version.cuda and not torch.cuda.is_available():
        advice.append(
            "torch is a CUDA build and there is no GPU: it works, but a CPU build is some gigabytes smaller "
            "(pip install torch --index-url https://download.pytorch.org/whl/cpu)."
        )
    if len(set(report["packages"].values())) > 1:
        advice.append("The trueup packages differ in version: install the same version of each.")
    return advice


def _cann() -> str | None:
    """Version of the CANN in the environment, else of the one in its usual place."""
    homes = [os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME"),
             ASCEND / "cann", ASCEND / "ascend-toolkit/latest"]
    for home in (Path(home) for home in homes if home):
        version = _first_version([*sorted(home.glob("ascend_*_install.info")),
                                  *sorted(home.glob("*/ascend_*_install.info"))])
        if version:
            return f"{version}, {home}"
    return None


def _first_version(files: list[Path]) -> str | None:
    """The value of the first line `version=...` (in any case of letters) in ``files``."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key.strip().lower() == "version":
                return value.strip()
    return None
