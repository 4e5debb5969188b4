"""The results as pictures.

    python benchmarks/plots.py FOLDER

writes one SVG file for each of ``results/*.csv`` into FOLDER, for the documentation. Each function makes the
figure of one kind of file.
"""

import csv
import sys
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
OURS, OTHERS, AIM = "tab:blue", "0.6", "tab:red"
Rows = list[dict[str, str]]


def read() -> dict[str, Rows]:
    """The rows of each file, by its name without ending."""
    files = {}
    for path in sorted(RESULTS.glob("*.csv")):
        with path.open(newline="") as file:
            files[path.stem] = list(csv.DictReader(file))
    return files


def about(rows: Rows) -> str:
    first = rows[0]
    return (
        f"{first['machine']}, {first['instruction_set']}, {first['threads']} threads, "
        f"torch {first['torch']}, commit {first['commit']}"
    )


def bars(ax, labels: list[str], rows: Rows) -> None:
    """Medians, with quartiles as lines."""
    ratios = [float(row["ratio"]) for row in rows]
    spread = [[abs(float(row["ratio"]) - float(row[end])) for row in rows] for end in ("low", "high")]
    colors = [OURS if label.startswith(("ours", "forward", "call")) else OTHERS for label in labels]
    ax.barh(labels, ratios, xerr=spread, color=colors, error_kw={"lw": 1, "ecolor": "0.3"})
    ax.axvline(1, color="k", lw=0.8)
    ax.invert_yaxis()


def op(rows: Rows) -> Figure:
    fig, ax = plt.subplots(figsize=(8, 0.26 * len(rows) + 1), layout="constrained")
    bars(ax, [row["work"] for row in rows], rows)
    aims = [(float(row["at_most"]), row["work"]) for row in rows if row["at_most"]]
    ax.plot(*zip(*aims, strict=True), "|", color=AIM, ms=10, mew=2)
    ax.set(xscale="log", xlabel="time in copies of the tensor; red: at most")
    fig.suptitle(about(rows), fontsize=10)
    return fig


def peers(rows: Rows) -> Figure:
    """A panel for each job and dtype, in inference and in training."""
    lines = list(dict.fromkeys((row["job"], row["dtype"]) for row in rows))
    fig, axes = plt.subplots(
        len(lines), 2, figsize=(10, 3.2 * len(lines)), sharey="row", layout="constrained"
    )
    for (job, dtype), line in zip(lines, axes, strict=True):
        for ax, mode in zip(line, ("inference", "training"), strict=True):
            some = [row for row in rows if (row["job"], row["dtype"], row["mode"]) == (job, dtype, mode)]
            bars(ax, [row["variant"] for row in some], some)
            ax.set_xscale("log")
            ax.set_title(f"{job}, {dtype}, {mode}", fontsize=10)
        line[0].set_ylim(len(some) - 0.4, -0.6)
    fig.supxlabel("time in copies of queries and keys", fontsize=10)
    fig.suptitle(about(rows), fontsize=10)
    return fig


def curves(rows: Rows, panel: str, x: str, unit: str) -> Figure:
    """Time and peak memory against ``x``; dashed where one panel has inference and training."""
    panels, variants, modes = (
        [*dict.fromkeys(row[key] for row in rows)] for key in (panel, "variant", "mode")
    )
    fig, axes = plt.subplots(
        2, len(panels), figsize=(2.8 * len(panels), 5.2), sharex="col", layout="constrained"
    )
    for name, mode, (at, what) in product(variants, modes, enumerate(panels)):
        some = [row for row in rows if (row["variant"], row["mode"], row[panel]) == (name, mode, what)]
        dashed = panel != "mode" and mode == "training"
        for ax, key in zip(axes[:, at], ("ratio", "peak"), strict=True):
            if some:
                ax.plot(
                    [int(row[x]) for row in some],
                    [float(row[key]) for row in some],
                    "--" if dashed else "-",
                    marker=".",
                    color=f"C{variants.index(name)}",
                    label=name + ", training" * dashed,
                )
    for ax, what in zip(axes[0], panels, strict=True):
        ax.set_title(what, fontsize=10)
    axes[0, 0].set_ylabel("time")
    axes[1, 0].set_ylabel("peak memory")
    handles = dict(zip(*axes[0, 0].get_legend_handles_labels()[::-1], strict=True))
    fig.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=9)
    fig.suptitle(f"{about(rows)}\n{unit}", fontsize=10)
    return fig


def layer(rows: Rows) -> Figure:
    fig = curves(rows, "mode", "size", "in units of the layer without RoPE")
    for ax in fig.axes:
        ax.set_ylim(0.75)
        ax.set_xscale("log", base=2)
    for ax in fig.axes[len(fig.axes) // 2 :]:
        ax.set_xlabel("N of N x N tokens")
    return fig


def scaling(rows: Rows) -> Figure:
    rows = [{**row, "panel": row["varied"] + ", 1 thread" * (row["threads"] == "1")} for row in rows]
    fig = curves(rows, "panel", "value", "time in copies of the tensor, memory in its size")
    half = len(fig.axes) // 2
    for time, peak in zip(fig.axes[:half], fig.axes[half:], strict=True):
        peak.set_xlabel(time.get_title().split(",")[0])
        time.set_yscale("log")
        peak.set_ylim(0)
        if time.get_title() != "axes":
            time.set_xscale("log", base=2)
    return fig


KINDS = {"op": op, "peers": peers, "layer": layer, "scaling": scaling}


def figures() -> dict[str, Figure]:
    """By name of the file."""
    return {name: kind(rows) for name, rows in read().items() if (kind := KINDS.get(name.split("-")[0]))}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures().items():
        figure.savefig(folder / f"{name}.svg")
