"""One picture of the results: what the flag costs, whom it holds up, and how it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from results import middle, paired_ratios

Data = Mapping[str, Any]
COLOURS = {"ours": "#1f6fb4", "peer": "#d9822b", "base": "#8a8f98"}
NAMES = {"ours": "ours", "peer": "0.5.11", "base": "0.5.10.post1"}
_TEXT, _FAINT = "#22262b", "#c9ced6"
_OFF = {"flag": False, "asked": "no"}
_WANTED = {"no": "nobody asks", "int32": "all ask, int32", "auto": "all ask, auto"}


def draw(data: Data, target: Path) -> None:
    """Write the picture as PNG. A panel without figures stays empty."""
    style = {
        "font.size": 9,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "axes.edgecolor": _FAINT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlesize": 10,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
        figure.get_layout_engine().set(wspace=0.06, hspace=0.09)
        panels: Sequence[tuple[Callable[[Axes, Data], bool], str]] = (
            (lambda ax, d: _throughput(ax, d, 64), "Output tok/s against the flag off, batch 64"),
            (lambda ax, d: _throughput(ax, d, 1), "Output tok/s against the flag off, batch 1"),
            (_stalls, "Longest gap of 32 others as a request's rows leave"),
            (_growth, "GPU time a step, 48 layers, top-8 of 128"),
        )
        for ax, (panel, title) in zip(axes.flat, panels):
            ax.set_title(title, pad=10)
            if not panel(ax, data):
                ax.clear()
                ax.set_axis_off()
        figure.text(
            0.99,
            -0.005,
            f"{data['machine']}, {data['date']}, commit {data['commit'][:9]}",
            ha="right",
            va="top",
            fontsize=8,
            color="#6b7280",
        )
        figure.savefig(target, dpi=160, bbox_inches="tight", pad_inches=0.15)
        plt.close(figure)


def _throughput(ax: Axes, data: Data, batch: int) -> bool:
    """Every pair a dot, the median a bar: percent of throughput lost or won."""
    places = []
    for asked in _WANTED:
        for engine in ("base", "peer", "ours"):
            row = _row(data, engine, asked, batch)
            ratios = paired_ratios(data, row, _off(engine), "output_tps") if row else []
            if ratios:
                places.append((asked, engine, [100 * (ratio - 1) for ratio in ratios]))
    if not places:
        return False
    lowest = min(min(values) for *_, values in places)
    y, before, ticks = 0.0, None, []
    for asked, engine, values in places:
        if asked != before:
            y -= 1.9 if before else 0.8
            ax.text(0, y + 0.8, _WANTED[asked], weight="bold", va="center", transform=_across(ax))
        else:
            y -= 1.0
        before = asked
        ticks.append((y, NAMES[engine]))
        median = middle(values)
        ax.barh(y, median, height=0.62, color=COLOURS[engine], alpha=0.35)
        ax.plot(values, [y] * len(values), "o", ms=4, color=COLOURS[engine], alpha=0.9, mew=0)
        ax.text(1.0, y, f"{median:+.1f}%", va="center", ha="right", transform=_across(ax))
    ax.axvline(0, color=_TEXT, lw=0.8)
    ax.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    ax.set_xlim(min(1.12 * lowest, -1.0), max(-0.28 * lowest, 1.5))
    ax.set_ylim(y - 0.6, 0.6)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    ax.grid(axis="x", color=_FAINT, lw=0.5)
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    return True


def _across(ax: Axes) -> Any:
    """Across the panel in parts of its width, up it in the data's units."""
    return ax.get_yaxis_transform()


def _stalls(ax: Axes, data: Data) -> bool:
    entries = data.get("stall", [])
    order = [
        (engine, asked)
        for engine in ("peer", "ours")
        for asked in ("int32", "auto", "no")
        if any((e["engine"], e["asked"]) == (engine, asked) for e in entries)
    ]
    if not order:
        return False
    sizes = sorted({entry["prompt_tokens"] for entry in entries})
    ticks = []
    for place, (engine, asked) in enumerate(order):
        for shift, size in zip((-0.19, 0.19), sizes):
            entry = next(
                (
                    e
                    for e in entries
                    if (e["engine"], e["asked"], e["prompt_tokens"]) == (engine, asked, size)
                ),
                None,
            )
            if entry:
                gaps, quiet = entry["longest_gap_ms"], middle(entry["quiet_gap_ms"])
                x = place + shift
                long = size == sizes[-1]
                ax.bar(x, middle(gaps), 0.34, color=COLOURS[engine], alpha=0.45 if long else 0.2)
                ax.plot([x] * len(gaps), gaps, "o", ms=4, color=COLOURS[engine], mew=0)
                ax.plot([x - 0.17, x + 0.17], [quiet, quiet], color=_TEXT, lw=1.2)
                text = f"{size:,}\ntokens"
                ax.annotate(
                    text,
                    (x, 0),
                    (0, -4),
                    textcoords="offset points",
                    ha="center",
                    va="top",
                    fontsize=7,
                )
        ticks.append(f"{NAMES[engine]}, {asked}" if asked != "no" else f"{NAMES[engine]}, no rows")
    ax.set_xticks(range(len(order)), ticks)
    ax.tick_params(axis="x", length=0, pad=24)
    ax.set_ylabel("ms (line: in the steps just before)")
    ax.grid(axis="y", color=_FAINT, lw=0.5)
    ax.set_axisbelow(True)
    return True


def _growth(ax: Axes, data: Data) -> bool:
    """What a step adds, against the copies that it replaces; the band holds 80% of the samples."""
    usual = [
        k
        for k in data.get("kernels", [])
        if (k["layers"], k["top_k"], k["experts"]) == (48, 8, 128)
    ]
    if not usual:
        return False
    lines = {
        "copies": ("48 copies, int32 (0.5.10, 0.5.11)", COLOURS["peer"]),
        "pack_and_file": ("pack and file at once (decode)", COLOURS["ours"]),
        "pack": ("pack (prefill)", "#7fb2dd"),
        "file": ("file, on a side stream (prefill)", "#5aa9a3"),
    }
    for what, (label, colour) in lines.items():
        points = sorted((k for k in usual if k["what"] == what), key=lambda k: k["tokens"])
        if not points:
            continue
        x = [k["tokens"] for k in points]
        ax.plot(x, [k["us"] for k in points], "o-", ms=3.5, lw=1.4, color=colour, label=label)
        low, high = [k["us_p10"] for k in points], [k["us_p90"] for k in points]
        ax.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel("tokens")
    ax.set_ylabel("us")
    ax.grid(color=_FAINT, lw=0.5)
    ax.legend(frameon=False, fontsize=8)
    return True


def _row(data: Data, engine: str, asked: str, batch: int) -> Data | None:
    return next(
        (
            row
            for row in data["rows"]
            if (row["engine"], row["flag"], row["asked"], row["batch"])
            == (engine, True, asked, batch)
        ),
        None,
    )


def _off(engine: str) -> Data:
    return {**_OFF, "engine": "ours" if engine == "base" else engine}
