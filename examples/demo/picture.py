"""The demo's picture: every choice of one request, and how busy every expert was."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

_PROMPT, _NEW, _INK = "#f1efe9", "#ffffff", "#2b2b2b"


def draw(
    path: Path,
    rows: np.ndarray,
    tokens: Sequence[str],
    prompt: int,
    everything: np.ndarray,
    experts: int,
) -> None:
    """Write a PNG.

    Args:
        rows: int32 [rows, layers, top_k] of the request on the left.
        tokens: text of each of its tokens.
        prompt: how many of them are the prompt's.
        everything: rows of all requests, for the bars on the right.
        experts: how many there are in a layer.
    """
    count, layers, _ = rows.shape
    colours = [to_rgb(c) for c in plt.get_cmap("viridis")(np.linspace(0.05, 0.8, layers))]
    figure, (left, right) = plt.subplots(
        1,
        2,
        sharey=True,
        figsize=(0.19 * count + 4.2, 11),
        width_ratios=[0.19 * count, 2.2],
        layout="constrained",
    )
    image = np.empty((layers * experts, count, 3))
    image[:, :prompt], image[:, prompt:] = to_rgb(_PROMPT), to_rgb(_NEW)
    token = np.arange(count)[:, None]
    for layer in range(layers):
        image[layer * experts + rows[:, layer], token] = colours[layer]
    left.imshow(image, aspect="auto", interpolation="nearest")
    left.set_xticks(
        range(count), [_shown(t) for t in tokens[:count]], family="monospace", fontsize=8
    )
    left.set_xlabel("tokens of one request: its prompt, then what the model wrote")
    left.set_ylabel(f"experts 0 to {experts - 1} of each layer")
    left.axvline(prompt - 0.5, color=_INK, linewidth=1)
    for x, text in ((prompt - 1, "prompt"), (prompt, "new")):
        side = "right" if text == "prompt" else "left"
        left.annotate(
            text,
            (x, 0),
            (0, 6),
            textcoords="offset points",
            ha=side,
            color=_INK,
            annotation_clip=False,
        )
    fair = everything.shape[2] / experts
    for layer in range(layers):
        share = np.bincount(everything[:, layer].ravel(), minlength=experts) / len(everything)
        at = layer * experts + np.arange(experts)
        right.barh(at, share / fair, height=1.0, color=colours[layer])
    right.axvline(1, color=_INK, linewidth=0.8, linestyle=":")
    right.set_xlabel("load of the expert over\nall requests (1: even share)")
    for axes in (left, right):
        axes.set_yticks(
            [(i + 0.5) * experts - 0.5 for i in range(layers)],
            [f"layer {i}" for i in range(layers)],
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for i in range(1, layers):
            axes.axhline(i * experts - 0.5, color=_INK, linewidth=0.6)
    figure.suptitle("Which experts each token was routed to", fontsize=15, color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shown(token: str) -> str:
    return {" ": "␣", "\n": "↵", "$": r"\$"}.get(token, token)
