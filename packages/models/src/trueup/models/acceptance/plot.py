"""Acceptance by depth, and expected against achieved speed, as one picture."""
from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], file: Path) -> None:
    """Write ``file``; its ending chooses the format.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    speed = report["speed"]
    figure, axes = plt.subplots(1, 2 if speed else 1, figsize=(10 if speed else 6.5, 4.2), squeeze=False,
                                width_ratios=[3, 1] if speed else None, layout="constrained")
    left = axes[0][0]
    ranked = sorted(report["signatures"], key=lambda s: s["distance"])
    for i, s in enumerate(ranked):
        depths = range(1, len(s["by_depth"]) + 1)
        if s["name"] == "this run":
            left.plot(depths, s["by_depth"], color="black", linewidth=2.5, marker="o", label="this run", zorder=3)
        else:
            left.plot(depths, s["by_depth"], linewidth=1, marker="os^vDPX*"[i % 8], markersize=4, label=s["name"])
    if report["measured"]:
        left.plot(range(1, len(report["measured"]) + 1), report["measured"], color="black", linestyle="--", marker="x",
                  label="measured elsewhere", zorder=4)
    left.set(xlabel="depth of the draft", ylabel="share of drafts kept", ylim=(0, 1),
             xticks=range(1, report["draft_tokens"] + 1),
             title=f"{report['model']}, {report['spec']}: {report['tokens_per_round']:.2f} tokens a round")
    left.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    if speed:
        right = axes[0][1]
        heights = [speed["expected"], speed["achieved"]]
        bars = right.bar(["forwards\nalone", "achieved"], heights, color=["0.75", "0.35"])
        right.bar_label(bars, fmt="%.2f")
        right.axhline(1, color="black", linewidth=0.8)
        right.set(title="times plain decoding")
    figure.savefig(file, dpi=110)
    plt.close(figure)
